"""Finds the entries of the log that are no longer needed: a fold of the log for trimming. Pure.

An episode is settled when training consumed or excluded it by a step that the newest surviving checkpoint covers, so that a
learner that resumes there never asks for it; an episode that no learner trains (an evaluation, or asked for by somebody else),
when it has a result. What is settled leaves with all that comes before it; what a learner may begin from stays. An episode
that the learners of several policies train has an account for each, and leaves when all are settled.

Until the floor in the log has passed it, what training settled can be open again: a learner may begin before the step.
"""

from bisect import bisect_left
from collections.abc import Iterator, Set
from itertools import chain, islice

import msgspec

from fleetbus.config.league import MAX_SIZE, SPARE_VERSIONS
from fleetbus.core.training.floor import NO_FLOOR, find_group_number, refuses_request
from fleetbus.core.training.lineage import complete_lineages, compute_surviving_steps, is_surviving
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    FloorRaised,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)

CONTENT = frozenset({"obs", "act"})
"""Kinds of subjects that are trimmed without a floor: an empty one of them makes nothing happen twice."""

KEPT_CHECKPOINTS = 16
"""Checkpoints that the log names, newest last, with all that was trained since: a learner begins at one of them."""

KEPT_VERSIONS = 16
"""Versions from before the floor, or a league's window if that is more: an episode above it may have been sampled from one of
them, or name one as its opponent."""


MOST_KEPT_VERSIONS = MAX_SIZE + SPARE_VERSIONS
"""Of a league, whatever an entry says."""


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    lineage: str
    step: int
    episodes: tuple[str, ...]


class _OpenEpisode(msgspec.Struct, kw_only=True):
    """``number`` is the lowest by which its request could be refused; ``content`` where its first observation or action stands,
    negative while there is none: then behind its request."""

    number: int
    content: int
    policy: str = ""
    group: int = 0
    by_learner: bool = True
    settled_at: int = 0
    """Where the checkpoint stands that covers it; 0 while there is none, or once its content was removed."""

    def is_passed(self, floor: FloorRaised) -> bool:
        """True if no learner asks for it any more, wherever it begins."""
        return self.by_learner and self.group < floor.groups.get(self.policy, 0)


class _Training:
    """Steps of one ``train.<name>`` that no checkpoint covers yet, and what covered steps settled above the floor, by account:
    its name is the episode's and a ``suffix``."""

    def __init__(self) -> None:
        self.suffix = ""
        self._lineages: list[LineageStarted] = []
        self._steps: list[_Step] = []
        self._checkpoints: list[tuple[int, CheckpointStored]] = []
        self._settled: dict[str, tuple[_Step, _OpenEpisode]] = {}

    @property
    def first_open_group(self) -> int:
        """No learner asks for a group below it, except of those that the log holds unsettled."""
        return max((checkpoint.first_open_group for _, checkpoint in self._checkpoints), default=0)

    def find_first_needed(self) -> int:
        """The sequence from which a learner has to read its journal; 0: all of it."""
        return self._checkpoints[0][0] if len(self._checkpoints) == KEPT_CHECKPOINTS else 0

    def find_first_settled(self) -> int:
        """Below this position everything was settled when the oldest of the checkpoints was made; 0 while there are few."""
        return min((checkpoint.floor for _, checkpoint in self._checkpoints), default=0) if self.find_first_needed() else 0

    def on_lineage(self, started: LineageStarted) -> dict[str, _OpenEpisode]:
        """Void what the lineage before trained after its parent step: those episodes will be asked for again. Returns those
        that were settled."""
        self._lineages.append(started)
        surviving = compute_surviving_steps(self._lineages)
        self._steps = [step for step in self._steps if is_surviving(surviving, step.lineage, step.step)]
        self._checkpoints = [each for each in self._checkpoints if is_surviving(surviving, each[1].lineage, each[1].step)]
        reopened = {
            episode: found
            for episode, (step, found) in self._settled.items()
            if not is_surviving(surviving, step.lineage, step.step)
        }
        self._settled = {episode: entry for episode, entry in self._settled.items() if episode not in reopened}
        return reopened

    def on_step(self, step: StepTrained) -> None:
        self._lineages = complete_lineages(self._lineages, step.lineage)
        ids = (*step.episodes, *(exclusion.episode_id for exclusion in step.excluded))
        accounts = tuple(each + self.suffix for each in ids) if self.suffix else ids
        self._steps.append(_Step(lineage=step.lineage, step=step.step, episodes=accounts))

    def on_checkpoint(self, sequence: int, checkpoint: CheckpointStored, opened: dict[str, _OpenEpisode]) -> None:
        """Takes the episodes that are settled from now on out of ``opened``."""
        self._lineages = complete_lineages(self._lineages, checkpoint.lineage)
        surviving = compute_surviving_steps(self._lineages)
        if not is_surviving(surviving, checkpoint.lineage, checkpoint.step):
            return
        self._checkpoints = [*self._checkpoints[1 - KEPT_CHECKPOINTS :], (sequence, checkpoint)]
        covered = [step for step in self._steps if self._covers(checkpoint, step, surviving)]
        self._steps = [step for step in self._steps if step not in covered]
        for step in covered:
            settled = {each: opened.pop(each) for each in step.episodes if each in opened}
            for each in settled.values():
                each.settled_at = sequence
            self._settled |= {each: (step, entry) for each, entry in settled.items()}

    def list_settled(self, last_sequence: int) -> Iterator[str]:
        """The episodes above the floor that were settled by then, and whose content was not removed since."""
        for each, (_, entry) in self._settled.items():
            if 0 < entry.settled_at <= last_sequence:
                yield each.removesuffix(self.suffix)

    def mark_removed(self, episode: str, last_sequence: int) -> None:
        """The content of an episode that was settled by then has left the log."""
        found = self._settled.get(episode + self.suffix)
        if found is not None and found[1].settled_at <= last_sequence:
            found[1].settled_at = 0

    def on_floor(self, floor: FloorRaised) -> None:
        """Keep settled what the floor passed."""
        self._settled = {each: entry for each, entry in self._settled.items() if not entry[1].is_passed(floor)}

    def _covers(self, checkpoint: CheckpointStored, step: _Step, surviving: dict[str, float]) -> bool:
        return step.step <= checkpoint.step and is_surviving(surviving, step.lineage, step.step)


class Retention:
    """Enter every entry of the log in order; memory grows with the episodes that are not settled, or not below the floor."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenEpisode] = {}
        """By account: an episode's own, and that of each policy that joined it."""
        self._answered: dict[str, int] = {}
        """By episode that no learner trains, and whose content may be above an open one, where its result stands."""
        self._joined: dict[str, str] = {}
        """By policy that joined an episode of another the suffix of its accounts."""
        self._ended: set[str] = set()
        """Policies whose training has finished: until its next lineage nobody needs the accounts with which one joined."""
        self._training: dict[str, _Training] = {}
        self._groups: dict[str, dict[int, int]] = {}
        """By policy of every group that is not below the floor its first request."""
        self._versions: dict[str, list[int]] = {}
        self._kept_versions: dict[str, int] = {}
        """By policy whose versions play as opponents how many from before the floor: who serves them finds them in the log."""
        self.floor: FloorRaised = NO_FLOOR
        """As the log has it."""

    def __len__(self) -> int:
        """Accounts of episodes that are requested and not settled."""
        return len(self._open)

    def enter(self, sequence: int, subject: str, message: Message | None) -> None:
        """One entry; ``message`` is needed for everything but observations, actions and claims."""
        tokens = subject.split(".")
        if tokens[2] in CONTENT:
            for account in self._list_accounts(tokens[-1]):
                if account.content < 0:
                    account.content = sequence
            return
        match message:
            case EpisodeRequested():
                self._enter_request(sequence, message)
            case EpisodeFinished() if (found := self._open.get(message.episode_id)) is not None and not found.by_learner:
                del self._open[message.episode_id]
                self._answered[message.episode_id] = sequence
            case TrainingFinished(more=False):
                self._ended.add(tokens[-1])
            case LineageStarted() if tokens[2] == "train":
                self._ended.discard(tokens[-1])
                self._open |= self._get_training(tokens[-1]).on_lineage(message)
            case StepTrained():
                self._get_training(tokens[-1]).on_step(message)
            case CheckpointStored():
                self._get_training(tokens[-1]).on_checkpoint(sequence, message, self._open)
            case PolicyPublished():
                self._versions.setdefault(tokens[-1], []).append(sequence)
                self._kept_versions[tokens[-1]] = max(
                    min(message.window, MOST_KEPT_VERSIONS), self._count_kept_versions(tokens[-1])
                )
            case FloorRaised():
                self._enter_floor(message)

    def _enter_floor(self, floor: FloorRaised) -> None:
        self.floor = floor
        self._open = {each: episode for each, episode in self._open.items() if not episode.is_passed(floor)}
        self._answered = {each: at for each, at in self._answered.items() if at >= floor.sequence}
        for training in self._training.values():
            training.on_floor(floor)
        for policy, first in floor.groups.items():
            requested = self._groups.get(policy, {})
            for number in [number for number in requested if number < first]:
                del requested[number]

    def _enter_request(self, sequence: int, request: EpisodeRequested) -> None:
        if request.episode_id in self._open or refuses_request(self.floor, request):
            return
        group = find_group_number(request)
        number = sequence if group is not None else min(request.earliest_sequence or sequence, sequence)
        by_learner = request.split != "eval" and bool(request.lineage)
        for policy in request.trained_policies if by_learner else (request.policy,):
            if policy != request.policy and policy not in self._joined:
                self._joined[policy] = self._get_training(policy).suffix = f"@{policy}"
            suffix = self._joined[policy] if policy != request.policy else ""
            self._open[request.episode_id + suffix] = _OpenEpisode(
                number=number,
                content=-sequence,
                policy=policy,
                group=group or 0,
                by_learner=by_learner,
            )
            if group is not None:
                self._groups.setdefault(policy, {}).setdefault(group, sequence)

    def _list_accounts(self, episode: str) -> list[_OpenEpisode]:
        """The accounts of an episode that are not settled."""
        found = (self._open.get(episode + suffix) for suffix in ("", *self._joined.values()))
        return [account for account in found if account is not None]

    def _list_needed(self) -> Iterator[_OpenEpisode]:
        """The accounts that somebody has still to settle."""
        left = self._left
        return (account for account in self._open.values() if account.policy not in left)

    def _is_needed(self, episode: str) -> bool:
        left = self._left
        return any(account.policy not in left for account in self._list_accounts(episode))

    @property
    def _left(self) -> Set[str]:
        """The policies that joined episodes of another, and whose training has finished."""
        return self._joined.keys() & self._ended

    def mark_content_skipped(self) -> None:
        """Observations and actions up to here were not entered: what is needed may begin right after its request."""
        for episode in self._open.values():
            episode.content = abs(episode.content)

    def is_settled(self, subject: str) -> bool:
        """True if an entry on this subject of an episode is no longer needed: it is settled, or was never requested."""
        return not self._is_needed(subject.rpartition(".")[2])

    def limit(self, last_sequence: int) -> int:
        """The last sequence, up to ``last_sequence``, before any content that is needed."""
        return min((episode.content - 1 for episode in self._list_needed() if episode.content > 0), default=last_sequence)

    def list_settled(self, last_sequence: int, most: int, *, trimmed: int = 0) -> list[str]:
        """So many episodes that were settled by then and that the floor has not passed, until `mark_removed`: nobody needs
        their content, even where an open episode before them keeps the rest. Up to ``trimmed`` there is no content any more."""
        answered = (each for each, at in self._answered.items() if trimmed < at <= last_sequence)
        settled = chain(answered, *(training.list_settled(last_sequence) for training in self._training.values()))
        return list(islice((each for each in dict.fromkeys(settled) if not self._is_needed(each)), most))

    def mark_removed(self, episode: str, last_sequence: int) -> None:
        """The content of an episode that was settled by then has left the log."""
        self._answered.pop(episode, None)
        for training in self._training.values():
            training.mark_removed(episode, last_sequence)

    def compute_floor(self, last_sequence: int) -> FloorRaised:
        """Below which requests, and groups of each policy, everything is settled for good, of all up to ``last_sequence``.

        A group is asked for by its number, so what leaves are whole groups below the first that may be asked for again.
        """
        sequence = min((episode.number for episode in self._list_needed()), default=last_sequence + 1)
        groups: dict[str, int] = {}
        left = self._left
        for policy, requested in self._groups.items():
            if policy in left:
                continue
            mine = (episode.group for episode in self._open.values() if episode.policy == policy and episode.by_learner)
            first = groups[policy] = min(self._get_training(policy).first_open_group, *mine, 1 << 62)
            open_groups = (at for number, at in requested.items() if number >= first)
            sequence = min(sequence, *open_groups, last_sequence + 1)
        for policy in left:  # what leaves without it is passed for it, too
            requested = self._groups.get(policy, {})
            kept = [number for number, at in requested.items() if at >= max(self.floor.sequence, sequence)]
            groups[policy] = min(kept, default=max(requested, default=-1) + 1)
        raised = {policy: max(self.floor.groups.get(policy, 0), number) for policy, number in groups.items()}
        return FloorRaised(
            sequence=max(self.floor.sequence, min(sequence, last_sequence + 1)), groups={**self.floor.groups, **raised}
        )

    def find_first_needed(self, kind: str, name: str, floor: int) -> int:
        """Nobody needs what stands on ``train.<name>`` or ``policy.<name>`` before this sequence, at most ``floor``."""
        if kind == "train":
            return min(self._get_training(name).find_first_needed(), floor)
        versions, kept = self._versions.get(name, []), self._count_kept_versions(name)
        before = bisect_left(versions, floor)
        if before < kept:
            return 0
        del versions[: before - kept]
        return versions[0]

    def find_archive_floor(self) -> int:
        """The sequence below which an archive may forget: no learner reads there, at whichever of the newest checkpoints it
        begins, nor would a log that is restored from the archive need it.

        It is the floor of the log at most, for what is below that is refused by number; and it keeps what the oldest of those
        checkpoints had not settled, for a log that went back in time may have a lower floor again.
        """
        floor = self.floor.sequence
        for name, training in self._training.items():
            versions = self._versions.get(name, [0])
            oldest = versions[max(bisect_left(versions, self.floor.sequence) - self._count_kept_versions(name), 0)]
            floor = min(floor, training.find_first_needed(), training.find_first_settled(), oldest)
        return floor

    def list_names(self) -> list[tuple[str, str]]:
        """The kind and name of every ``train.<name>`` and ``policy.<name>`` so far."""
        return [("train", name) for name in self._training] + [("policy", name) for name in self._versions]

    def _count_kept_versions(self, policy: str) -> int:
        return self._kept_versions.get(policy, KEPT_VERSIONS)

    def _get_training(self, name: str) -> _Training:
        return self._training.setdefault(name, _Training())


class _Journal(msgspec.Struct):
    first: int
    last: int
    is_over: bool


class SessionRetention:
    """Enter every entry of a journal in order; memory grows with the journals in the log."""

    def __init__(self) -> None:
        self._journals: dict[str, _Journal] = {}

    def __len__(self) -> int:
        return len(self._journals)

    def enter(self, sequence: int, session: str, *, is_over: bool) -> None:
        """``is_over``: the entry is the journal's last."""
        journal = self._journals.setdefault(session, _Journal(sequence, sequence, False))
        journal.last = sequence
        journal.is_over = journal.is_over or is_over

    def list_over(self, last_sequence: int) -> dict[str, int]:
        """By session the last entry of every journal that ended by ``last_sequence``."""
        return {
            session: journal.last
            for session, journal in self._journals.items()
            if journal.is_over and journal.last <= last_sequence
        }

    def compute_prefix(self, last_sequence: int) -> int:
        """Below this sequence, at most one after ``last_sequence``, all journals ended by ``last_sequence``."""
        needed = (
            journal.first for journal in self._journals.values() if not (journal.is_over and journal.last <= last_sequence)
        )
        return min(min(needed, default=last_sequence + 1), last_sequence + 1)

    def forget(self, session: str) -> None:
        """The journal has left the log."""
        del self._journals[session]
