"""The audit: a fold of the whole log, entry by entry, into books that balance or findings that say where they do not. Pure.

Requested = trained + excluded by reason + evaluation + in flight; one result per episode; nothing trained twice in the lineage
that survived; no action that was never asked for. Memory grows with episodes, not with messages. Above it is the reader
`fleetbus.audit`; it must never believe a message over the position of another.
"""

from __future__ import annotations

from collections import Counter

from fleetbus.core.audit_episode import EpisodeAudit
from fleetbus.core.audit_findings import Attempts, Books, Findings, Report
from fleetbus.core.audit_training import Settled, TrainingAudit
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)

EpisodeMessage = EpisodeRequested | AttemptStarted | AttemptReleased | Observation | Action | EpisodeFinished


class Audit:
    """Enter every entry of a log in order, then ask for the report."""

    def __init__(self) -> None:
        self._findings = Findings()
        self._episodes: dict[str, EpisodeAudit] = {}
        self._training: dict[str, TrainingAudit] = {}
        self._versions: dict[str, set[int]] = {}
        self._counts: Counter[str] = Counter()
        self._last_sequence = 0

    @property
    def missing(self) -> int:
        """Positions of the log that were not entered so far: trimmed, or lost."""
        return self._last_sequence - self._counts["entries"]

    def enter(self, sequence: int, subject: str, message: Message | None) -> None:
        """One entry; ``message`` is None for what an audit does not look into. Raises `ValueError` out of order."""
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
                self._get_training(tokens[-1]).on_lineage(sequence, message, self._findings)
            case StepTrained():
                self._counts["steps"] += 1
                self._get_training(tokens[-1]).on_step(sequence, message, self._findings)
            case CheckpointStored():
                self._get_training(tokens[-1]).on_checkpoint(sequence, message, self._findings)
            case TrainingFinished():
                self._get_training(tokens[-1]).on_end(sequence, message, self._findings)
            case EpisodeRequested() | AttemptStarted() | AttemptReleased() | Observation() | Action() | EpisodeFinished():
                self._enter_episode(sequence, tokens, message)

    def enter_malformed(self, sequence: int, subject: str) -> None:
        """An entry that is no message; workers ignore it, and so do the books."""
        self.enter(sequence, subject, None)
        self._counts["malformed"] += 1

    def report(self) -> Report:
        """The books as of the last entry."""
        findings = self._findings
        settled = Settled()
        void: Counter[str] = Counter()
        for book in self._training.values():
            counted = book.list_settlements(findings)
            void += book.void(counted)
            for settlement in counted:
                settled.add(settlement, findings)
        self._check_settled(settled)
        self._check_unsettled(settled)
        books = self._build_books(settled, void.total())
        if books.requested != books.accounted:
            findings.add("books_open", f"{books.requested} requested, {books.accounted} accounted for")
        return Report(
            last_sequence=self._last_sequence,
            entries=self._counts["entries"],
            malformed=self._counts["malformed"],
            books=books,
            attempts=self._count_attempts(),
            outcomes=dict(Counter(episode.outcome for episode in self._episodes.values() if episode.outcome is not None)),
            observations=self._counts["observations"],
            actions=self._counts["actions"],
            versions=sum(map(len, self._versions.values())),
            steps=self._counts["steps"],
            lineages=tuple(lineage for book in self._training.values() for lineage in book.lineages),
            findings=findings.list_found(),
        )

    def _enter_episode(self, sequence: int, tokens: list[str], message: EpisodeMessage) -> None:
        findings = self._findings
        if message.episode_id != tokens[-1]:
            findings.add("misfiled", tokens[-1], sequence)
            return
        episode = self._episodes.get(message.episode_id)
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
                episode.on_result(sequence, message, findings)
            case Observation():
                self._counts["observations"] += 1
                episode.on_observation(sequence, message, findings)
            case Action():
                self._counts["actions"] += 1
                episode.on_action(sequence, tokens[3], message, self._versions.get(episode.policy, ()), findings)

    def _publish(self, sequence: int, name: str, published: PolicyPublished) -> None:
        versions = self._versions.setdefault(name, set())
        if published.version in versions:
            self._findings.add("version_repeated", f"{name}/{published.version}", sequence)
        versions.add(published.version)

    def _get_training(self, name: str) -> TrainingAudit:
        return self._training.setdefault(name, TrainingAudit())

    def _check_settled(self, settled: Settled) -> None:
        for episode_id in settled.trained.keys() & settled.excluded.keys():
            self._findings.add("trained_and_excluded", episode_id, settled.trained[episode_id])
        for episode_id in settled.ids():
            episode = self._episodes.get(episode_id)
            if episode is None or not episode.requested:
                self._findings.add("never_requested", episode_id, settled.trained.get(episode_id, 0))
            elif episode.split == "eval":
                self._findings.add("evaluation_settled", episode_id, settled.trained.get(episode_id, 0))
        for episode_id, sequence in settled.trained.items():
            episode = self._episodes.get(episode_id)
            graded = episode is not None and episode.outcome in GRADED and episode.result_sequence < sequence
            if not graded:
                self._findings.add("trained_without_result", episode_id, sequence)

    def _check_unsettled(self, settled: Settled) -> None:
        asked: dict[str, list[EpisodeAudit]] = {}
        for episode in self._episodes.values():
            if episode.requested and episode.split == "train" and episode.lineage:
                asked.setdefault(episode.policy, []).append(episode)
        for name, training in self._training.items():
            training.check_unsettled(asked.get(name, []), settled, self._findings)

    def _build_books(self, settled: Settled, void: int) -> Books:
        requested = [episode for episode in self._episodes.values() if episode.requested]
        evaluation = sum(episode.split == "eval" and episode.outcome is not None for episode in requested)
        ids = set(settled.ids())
        places = Counter(
            _classify(episode)
            for episode in requested
            if episode.episode_id not in ids and not (episode.split == "eval" and episode.outcome is not None)
        )
        return Books(
            requested=len(requested),
            trained=settled.trainings,
            excluded=dict(sorted(settled.exclusions.items())),
            evaluation=evaluation,
            waiting=places["waiting"],
            running=places["running"],
            finished=places["finished"],
            void=void,
        )

    def _count_attempts(self) -> Attempts:
        """A claim is finished when a result ended it, superseded when another followed without a goodbye."""
        episodes = self._episodes.values()
        started = sum(episode.attempts for episode in episodes)
        released = sum(episode.released for episode in episodes)
        finished = sum(episode.holding and episode.result_sequence > 0 for episode in episodes)
        in_flight = sum(episode.holding and not episode.result_sequence for episode in episodes)
        return Attempts(
            started=started,
            finished=finished,
            released=released,
            superseded=started - finished - released - in_flight,
            in_flight=in_flight,
        )


def _classify(episode: EpisodeAudit) -> str:
    if episode.outcome is not None:
        return "finished"
    return "running" if episode.holding else "waiting"
