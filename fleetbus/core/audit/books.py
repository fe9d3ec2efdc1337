"""The audit: a fold of the whole log, entry by entry, into books that balance or findings that say where they do not. Pure.

Requested = trained + excluded by reason + evaluation + in flight; one result per episode; nothing trained twice in the lineage
that survived; no action that was never asked for. Memory grows with the episodes above the floor. Above it is the
reader `fleetbus.audit.run`; it must never believe a message over the position of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from fleetbus.core.audit.addresses import Addresses
from fleetbus.core.audit.beginning import Beginning, EpisodeMessage
from fleetbus.core.audit.closed import ClosedBooks, count_attempts, sum_attempts
from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.audit.exclusions import Excluding, judge_exclusions
from fleetbus.core.audit.findings import Books, Findings, Report
from fleetbus.core.audit.operations import Operations, is_operation
from fleetbus.core.audit.rewards import judge_rewards
from fleetbus.core.audit.sessions import SessionsAudit
from fleetbus.core.audit.shares import apply_to_shares, is_left, list_left, rename_settled
from fleetbus.core.audit.training import Settled, TrainingAudit
from fleetbus.core.audit.versions import PolicyVersions
from fleetbus.core.training.floor import NO_FLOOR, merge_floors, parse_group_number, refuses_request
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    FloorRaised,
    LineageStarted,
    Message,
    Observation,
    OperationRecorded,
    PolicyPublished,
    SessionClaimed,
    SessionEnded,
    SessionRecorded,
    StepTrained,
    TrainingFinished,
)

LOST = {"task": "request", "obs": "observation", "act": "action", "episode": "claim or result"}
"""What an episode lost with an entry, by the kind of its subject."""


class Audit(msgspec.Struct):
    """Enter every entry of a log in order, then ask for the report. Before that it may be kept, and continued with what comes
    later: `encode`, `decode`.

    ``_unread`` is what was settled, or left, when a lineage began, until the next floor: who raises it may not have read of
    that lineage, which counts by it then.
    """

    _findings: Findings = msgspec.field(default_factory=Findings)
    _episodes: dict[str, EpisodeAudit] = {}
    _training: dict[str, TrainingAudit] = {}
    _versions: dict[str, PolicyVersions] = {}
    _counts: Counter[str] = msgspec.field(default_factory=Counter)
    _closed: ClosedBooks = msgspec.field(default_factory=ClosedBooks)
    _floor: FloorRaised = NO_FLOOR
    _refused: set[str] = set()
    _unread: set[str] = set()
    _last_sequence: int = 0
    _beginning: Beginning = msgspec.field(default_factory=Beginning)
    _addresses: Addresses = msgspec.field(default_factory=Addresses)
    _sessions: SessionsAudit = msgspec.field(default_factory=SessionsAudit)
    _operations: Operations = msgspec.field(default_factory=Operations)

    def __len__(self) -> int:
        """Episodes that are known one by one: those that the floor has not passed."""
        return len(self._episodes)

    @property
    def missing(self) -> int:
        """Positions of the log that were not entered so far: trimmed, or lost."""
        return self._last_sequence - (self._beginning.sequence - 1) - self._counts["entries"]

    def begin_at(self, sequence: int) -> None:
        """Of a log whose entries before ``sequence`` were removed: all that they settled is taken as settled, nothing that they
        held is missed, and the books are no proof of the whole. To be called before anything is entered."""
        self._beginning, self._last_sequence = Beginning(sequence=sequence), sequence - 1

    def begin_with(self, sequence: int, name: str, started: LineageStarted) -> None:
        """A lineage of ``train.<name>`` that began among what was removed."""
        self._get_training(name).begin_with(sequence, started)

    def enter(self, sequence: int, subject: str, message: Message | None, time_ns: int = 0) -> None:
        """One entry; ``message`` is None for what an audit does not look into. ``time_ns`` is the log's. Raises `ValueError`
        out of order."""
        if sequence <= self._last_sequence:
            raise ValueError(f"entry {sequence} comes after {self._last_sequence}")
        if sequence > self._last_sequence + 1:
            self._findings.add("entries_missing", f"{self._last_sequence + 1}-{sequence - 1}", sequence)
        self._last_sequence = sequence
        self._counts["entries"] += 1
        tokens = subject.split(".")
        match message:
            case PolicyPublished():
                self._publish(sequence, tokens[-1], message)
            case LineageStarted() if tokens[2] == "train":
                self._unread.update(self._collect_settled(Findings()).sequences, list_left(self._episodes, self._training))
                self._get_training(tokens[-1]).on_lineage(sequence, message, self._findings)
                self._get_versions(tokens[-1]).go_back(message.parent_step)
                self._mark_passed(tokens[-1])
            case StepTrained():
                self._counts["steps"] += 1
                step = rename_settled(message, tokens[-1], self._episodes, sequence, self._findings)
                self._get_training(tokens[-1]).on_step(
                    sequence, self._beginning.leave_out(step, self._episodes), self._findings
                )
                self._prove_step(sequence, tokens[-1], step)
            case CheckpointStored():
                self._get_training(tokens[-1]).on_checkpoint(sequence, message, self._findings)
                if not self._addresses.is_checkpoint_right(tokens[-1], message):
                    self._findings.add("checkpoint_elsewhere", f"{message.lineage}/{message.step}", sequence)
            case TrainingFinished():
                end = rename_settled(message, tokens[-1], self._episodes, sequence, self._findings)
                self._get_training(tokens[-1]).on_end(sequence, self._beginning.leave_out(end, self._episodes), self._findings)
                self._prove_exclusions(sequence, tokens[-1], end, end.step, is_end=True)
            case SessionClaimed() | SessionRecorded() | SessionEnded():
                self._sessions.enter(tokens[-1], message)
            case FloorRaised():
                self._raise_floor(sequence, message)
            case OperationRecorded() if is_operation(tokens):
                self._operations.apply(message, sequence, subject, time_ns)
            case EpisodeRequested() | AttemptStarted() | AttemptReleased() | Observation() | Action() | EpisodeFinished():
                self._enter_episode(sequence, tokens, message)

    def enter_malformed(self, sequence: int, subject: str) -> None:
        """An entry that is no message; workers ignore it, and so do the books."""
        self.enter(sequence, subject, None)
        self._counts["malformed"] += 1

    def enter_lost(self, sequence: int, subject: str) -> None:
        """An entry that was archived and that the log has lost: another may stand at its position by now."""
        kind, name = subject.split(".")[2], subject.rpartition(".")[2]
        self._findings.add("entries_lost", f"{name}: {LOST[kind]}" if kind in LOST else f"{kind} {name}", sequence)

    def enter_end(self, last_sequence: int, erasing: Iterable[str] = ()) -> None:
        """The log goes up to there by its server's word, and has these limits that remove entries."""
        if last_sequence > self._last_sequence:
            self._findings.add("entries_missing", f"{self._last_sequence + 1}-{last_sequence}", last_sequence)
        for limit in erasing:
            self._findings.add("log_erases", limit)

    def encode(self) -> bytes:
        """The books as of the last entry; to be asked for before the report, which adds what is only true of this end."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> Audit:
        """The audit as it was encoded; raises `msgspec.DecodeError`."""
        return msgspec.msgpack.decode(content, type=cls, dec_hook=_decode_counter)

    def report(self) -> Report:
        """The books as of the last entry."""
        findings = self._findings
        settled = self._collect_settled(findings)
        self._check_settled(settled, settled.ids())
        self._check_unsettled(settled, self._episodes.values())
        books = self._build_books(settled)
        if not self._counts["entries"]:
            findings.add("nothing_read", "entries 0")
        if books.requested != books.accounted:
            findings.add("books_open", f"{books.requested} requested, {books.accounted} accounted for")
        return Report(
            last_sequence=self._last_sequence,
            entries=self._counts["entries"],
            malformed=self._counts["malformed"],
            books=books,
            attempts=sum_attempts(count_attempts(self._episodes.values()) + self._closed.attempts),
            outcomes=dict(
                self._closed.outcomes
                + Counter(each.outcome for each in self._episodes.values() if each.outcome is not None and not each.is_share)
            ),
            observations=self._counts["observations"],
            actions=self._counts["actions"],
            versions=sum(map(len, self._versions.values())),
            steps=self._counts["steps"],
            lineages=tuple(lineage for training in self._training.values() for lineage in training.lineages),
            reached={name: training.reached for name, training in self._training.items()},
            trained_by={name: training.count_trained() for name, training in self._training.items()},
            findings=findings.list_found(),
            unproven=self._list_unproven(),
            refused=self._counts["refused"],
            undelivered=self._counts["not_delivered"],
            side_calls=self._counts["side_call"],
            unrewarded=self._counts["seat"],
            begins=self._beginning.sequence,
            sessions=self._sessions.count(),
            operations=self._operations,
        )

    def _list_unproven(self) -> tuple[str, ...]:
        """List what no entry of the log proves, as far as this one holds it."""
        counts = {
            "exclusions_unproven": "exclusions are for reasons that the learner alone knows",
            "rewards_unproven": "trained rewards that a judge changed are told by the learner alone",
        }
        return (
            *self._beginning.list_unproven(),
            *(f"{self._counts[kind]} {meaning}" for kind, meaning in counts.items() if self._counts[kind]),
        )

    def _raise_floor(self, sequence: int, raised: FloorRaised) -> None:
        """Everything below it has to be settled, and is counted for good."""
        floor = self._floor = merge_floors(raised, self._floor)
        passed = [episode for episode in self._episodes.values() if 0 < episode.requested < floor.sequence]
        unread, self._unread = self._unread, set()
        if not passed:
            return
        settled = self._collect_settled(self._findings)
        self._check_settled(settled, [episode.episode_id for episode in passed if episode.episode_id in settled.sequences])
        self._check_unsettled(settled, passed)
        for episode in passed:
            is_settled = episode.episode_id in settled.sequences
            by_learner = episode.split == "train" and bool(episode.lineage)
            is_passed = episode.passed or episode.episode_id in unread or is_left(episode, self._training)
            if not (is_settled or is_passed) and (by_learner or episode.outcome is None):
                self._findings.add("floor_unsettled", episode.episode_id, sequence)
            self._closed.add(episode, is_settled=is_settled)
            del self._episodes[episode.episode_id]
        closed = {episode.episode_id for episode in passed}
        for training in self._training.values():
            training.close(closed, self._findings)
        for versions in self._versions.values():
            versions.forget_old()

    def _mark_passed(self, policy: str) -> None:
        """A lineage has begun, perhaps behind what the floor has passed: that stays settled."""
        first = self._floor.groups.get(policy, 0)
        for episode in self._episodes.values():
            if episode.policy == policy and 0 <= parse_group_number(episode.group_id, -1) < first:
                episode.passed = True

    def _collect_settled(self, findings: Findings) -> Settled:
        settled = Settled()
        for training in self._training.values():
            for settlement in training.list_settlements(findings):
                settled.add(settlement, findings)
        return settled

    def _is_below_floor(self, message: EpisodeMessage) -> bool:
        """True if the floor refuses an entry of an episode that is not open; entries that follow a refused request are too."""
        match message:
            case EpisodeRequested():
                if message.episode_id not in self._episodes and refuses_request(self._floor, message):
                    self._refused.add(message.episode_id)
                    return True
                return False
            case Action() | AttemptReleased():
                return self._floor.sequence > 0
            case _:
                return 0 < message.request_sequence < self._floor.sequence or message.episode_id in self._refused

    def _enter_episode(self, sequence: int, tokens: list[str], message: EpisodeMessage) -> None:
        findings = self._findings
        if message.episode_id != tokens[-1]:
            findings.add("misfiled", tokens[-1], sequence)
            return
        episode = self._episodes.get(message.episode_id)
        if episode is None and self._beginning.takes(message):
            return
        if (episode is None or isinstance(message, EpisodeRequested)) and self._is_below_floor(message):
            self._counts["refused"] += 1
            return
        if episode is None:
            episode = self._episodes[message.episode_id] = EpisodeAudit(episode_id=message.episode_id)
            if not isinstance(message, EpisodeRequested):
                findings.add("never_requested", message.episode_id, sequence)
        match message:
            case EpisodeRequested():
                episode.on_request(sequence, message, findings)
                episode.stray = not self._get_training(message.policy).is_newest(message.lineage)
            case AttemptStarted():
                episode.on_claim(sequence, message, findings)
            case AttemptReleased():
                episode.on_release(sequence, message, findings)
            case EpisodeFinished():
                self._counts.update(each.reason for each in message.untrained)
                episode.on_result(sequence, message, findings)
            case Observation():
                self._counts["observations"] += 1
                episode.on_observation(sequence, tokens[3], message, findings)
            case _:
                self._counts["actions"] += 1
                episode.on_action(sequence, tokens[3], message, self._get_versions, findings)
        apply_to_shares(self._episodes, episode, sequence, message)

    def _publish(self, sequence: int, name: str, published: PolicyPublished) -> None:
        versions, made, is_own = self._get_versions(name), (published.version, published.step), name == published.policy
        if is_own and versions.repeats(published.version):
            self._findings.add("version_repeated", f"{name}/{published.version}", sequence)
        of_policy = self._get_versions(published.policy)  # another one's on the subject of a league, which has none of its own
        is_right = versions.add(*made) if is_own else versions.name_first() and of_policy.made(*made)
        if not is_right or not self._addresses.is_version_right(published, again=not is_own and self._beginning.is_whole):
            self._findings.add("version_elsewhere", f"{name}/{published.version}", sequence)

    def _prove_step(self, sequence: int, name: str, step: StepTrained) -> None:
        self._prove_exclusions(sequence, name, step, step.step - 1)
        started = self._get_training(name).find_lineage(step.lineage)
        if not self._beginning.is_whole:
            step = msgspec.structs.replace(
                step, rewards={episode: reward for episode, reward in step.rewards.items() if episode in self._episodes}
            )
        for episode_id, is_right in judge_rewards(step, started, self._episodes):
            if is_right is None:
                self._counts["rewards_unproven"] += 1
            elif not is_right:
                self._findings.add("reward_unjudged", episode_id, sequence)

    def _prove_exclusions(
        self, sequence: int, name: str, entry: StepTrained | TrainingFinished, step: int, *, is_end: bool = False
    ) -> None:
        started, versions = self._get_training(name).find_lineage(entry.lineage), self._get_versions(name)
        excluding = Excluding(
            step=step,
            is_end=is_end,
            settings=started.settings if started is not None else {},
            step_of=versions.steps,
            void=versions.void,
            unread_below=versions.unread_below,
        )
        for episode_id, is_founded in judge_exclusions(excluding, entry.excluded, self._episodes):
            if is_founded is None:
                self._counts["exclusions_unproven"] += 1
            elif not is_founded:
                self._findings.add("exclusion_unfounded", episode_id, sequence)

    def _get_training(self, name: str) -> TrainingAudit:
        return self._training.setdefault(name, TrainingAudit(begins_anywhere=not self._beginning.is_whole))

    def _get_versions(self, name: str) -> PolicyVersions:
        return self._versions.setdefault(name, PolicyVersions(begins_anywhere=not self._beginning.is_whole))

    def _check_settled(self, settled: Settled, ids: Iterable[str]) -> None:
        for episode_id in ids:
            if episode_id in settled.trained and episode_id in settled.excluded:
                self._findings.add("trained_and_excluded", episode_id, settled.trained[episode_id])
            episode = self._episodes.get(episode_id)
            if episode is None or not episode.requested:
                self._findings.add("never_requested", episode_id, settled.trained.get(episode_id, 0))
            elif episode.split == "eval":
                self._findings.add("evaluation_settled", episode_id, settled.trained.get(episode_id, 0))
            if (sequence := settled.trained.get(episode_id)) is not None:
                graded = episode is not None and episode.outcome in GRADED and episode.result_sequence < sequence
                if not graded:
                    self._findings.add("trained_without_result", episode_id, sequence)

    def _check_unsettled(self, settled: Settled, episodes: Iterable[EpisodeAudit]) -> None:
        asked: dict[str, list[EpisodeAudit]] = {}
        for episode in episodes:
            if episode.requested and episode.split == "train" and episode.lineage and not episode.passed:
                asked.setdefault(episode.policy, []).append(episode)
        for name, training in self._training.items():
            training.check_unsettled(asked.get(name, []), settled, self._findings)

    def _build_books(self, settled: Settled) -> Books:
        void = abandoned = 0
        for training in self._training.values():
            trained, gone = training.count_void(training.list_settlements(self._findings))
            void, abandoned = void + trained, abandoned + gone
        closed = self._closed
        requested = [episode for episode in self._episodes.values() if episode.requested]
        evaluation = sum(episode.split == "eval" and episode.outcome is not None for episode in requested)
        ids = set(settled.ids())
        places = Counter(
            _classify(episode)
            for episode in requested
            if episode.episode_id not in ids and not (episode.split == "eval" and episode.outcome is not None)
        )
        return Books(
            requested=len(requested) + closed.requested,
            trained=settled.trainings,
            excluded=dict(sorted(settled.exclusions.items())),
            evaluation=evaluation + closed.evaluation,
            waiting=places["waiting"],
            running=places["running"],
            finished=places["finished"] + closed.finished,
            void=void,
            abandoned=abandoned,
        )


def _decode_counter(_: type, counts: dict[str, int]) -> Counter[str]:
    return Counter(counts)


def _classify(episode: EpisodeAudit) -> str:
    if episode.outcome is not None:
        return "finished"
    return "running" if episode.holding else "waiting"
