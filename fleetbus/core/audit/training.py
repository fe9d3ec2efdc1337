"""The audit of one learner's book: steps by lineage, of which only those of the surviving lineage count. Pure.

Which lineage survives is known at the end only, so steps are kept as ids until then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import msgspec

from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.audit.findings import Findings, ReachedStep
from fleetbus.core.training.lineage import complete_lineages, compute_surviving_steps, is_surviving
from fleetbus_schemas import CheckpointStored, Exclusion, LineageStarted, StepTrained, TrainingFinished

MAX_SETTLEMENTS = 4096
"""Steps that are kept one by one; those before are known by their sums once they are settled for good."""

MAX_CHECKPOINTS = 4096


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """One entry that settled episodes: a step, or the end of training. ``closed_trained`` and ``closed_excluded``, by reason,
    are those that the floor has passed: they are known by their number alone."""

    sequence: int
    lineage: str
    step: int
    episodes: tuple[str, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    end: bool = False
    closed_trained: int = 0
    closed_excluded: dict[str, int] = msgspec.field(default_factory=dict)

    def close(self, closed: Collection[str]) -> Settlement:
        """The same after the floor has passed the episodes ``closed``."""
        left = tuple(episode for episode in self.episodes if episode not in closed)
        reasons = Counter(each.reason or "(none)" for each in self.excluded if each.episode_id in closed)
        if len(left) == len(self.episodes) and not reasons:
            return self
        return msgspec.structs.replace(
            self,
            episodes=left,
            excluded=tuple(each for each in self.excluded if each.episode_id not in closed),
            closed_trained=self.closed_trained + len(self.episodes) - len(left),
            closed_excluded=dict(Counter(self.closed_excluded) + reasons),
        )


class TrainingAudit(msgspec.Struct):
    """One ``train.<name>``. ``_first_step`` is that of the first settlement which is not merged with others.
    ``begins_anywhere``: the log's beginning was removed, so that steps and lineages follow others that nobody can read."""

    begins_anywhere: bool = False
    _lineages: list[LineageStarted] = []
    _settlements: list[Settlement] = []
    _checkpoints: list[tuple[int, CheckpointStored]] = []
    _closed_void: int = 0
    _closed_abandoned: int = 0
    _first_step: int = 1
    _began: dict[str, int] = {}
    """Where each lineage began."""

    @property
    def lineages(self) -> tuple[str, ...]:
        return tuple(started.lineage for started in self._lineages)

    @property
    def reached(self) -> ReachedStep:
        """The last step of the newest lineage."""
        if not self._lineages:
            return ReachedStep(lineage="", step=0)
        newest = self._lineages[-1]
        steps = [each.step for each in self._settlements if each.lineage == newest.lineage]
        return ReachedStep(lineage=newest.lineage, step=max([newest.parent_step, *steps]))

    @property
    def is_over(self) -> bool:
        """True if its newest lineage has finished."""
        return bool(self._settlements) and self._settlements[-1].end and self.is_newest(self._settlements[-1].lineage)

    def find_lineage(self, lineage: str) -> LineageStarted | None:
        """The beginning of that lineage."""
        return next((started for started in reversed(self._lineages) if started.lineage == lineage), None)

    def is_newest(self, lineage: str) -> bool:
        return bool(self._lineages) and self._lineages[-1].lineage == lineage

    def begin_with(self, sequence: int, started: LineageStarted) -> None:
        """A lineage that began before the first entry that can be read."""
        self._lineages.append(started)
        self._began[started.lineage] = sequence

    def on_lineage(self, sequence: int, started: LineageStarted, findings: Findings) -> None:
        """By itself a lineage starts at a checkpoint that counts, or anew if there is none; a person may order otherwise."""
        counting = {stored.step for _, stored in self._list_counting_checkpoints()}
        known = {stored.step for _, stored in self._checkpoints} if started.restart else counting
        anew = started.parent_step == 0 and (not counting or bool(started.restart))
        removed = self.begins_anywhere and started.parent_step < min(known, default=math.inf)
        if not anew and not removed and started.parent_step not in known:
            findings.add("lineage_unfounded", f"{started.lineage}/{started.parent_step}", sequence)
        self._lineages.append(started)
        self._began[started.lineage] = sequence

    def on_checkpoint(self, sequence: int, stored: CheckpointStored, findings: Findings) -> None:
        self._check_author(sequence, stored.lineage, stored.step, findings)
        self._checkpoints = [*self._checkpoints[-MAX_CHECKPOINTS:], (sequence, stored)]

    def on_step(self, sequence: int, entry: StepTrained, findings: Findings) -> None:
        self._check_author(sequence, entry.lineage, entry.step, findings)
        self._settlements.append(
            Settlement(
                sequence=sequence, lineage=entry.lineage, step=entry.step, episodes=entry.episodes, excluded=entry.excluded
            )
        )

    def on_end(self, sequence: int, entry: TrainingFinished, findings: Findings) -> None:
        self._check_author(sequence, entry.lineage, entry.step, findings)
        self._settlements.append(
            Settlement(sequence=sequence, lineage=entry.lineage, step=entry.step, excluded=entry.excluded, end=True)
        )

    def list_settlements(self, findings: Findings) -> list[Settlement]:
        """The settlements of the surviving lineage; its steps have to be 1, 2, 3 and so on, except where a lineage began at a
        checkpoint that the log had fallen behind.

        The end of training counts only for the newest lineage: a lineage that continues from there takes back what it excluded.
        """
        surviving = compute_surviving_steps(self._lineages)
        newest = self._lineages[-1].lineage if self._lineages else ""
        counted = [each for each in self._settlements if self._counts(each, surviving, newest)]
        lost = self._find_lost_steps(counted, surviving)
        for first, last, started in lost:
            findings.add("steps_lost", f"{started.parent}/{first}-{last}", self._began[started.lineage])
        expected = self._find_first_step(counted)
        for each in (each for each in counted if not each.end):
            expected = next((last + 1 for first, last, _ in lost if first == expected), expected)
            if each.step != expected:
                findings.add("step_out_of_order", f"{each.lineage}/{each.step}", each.sequence)
            expected += 1
        return counted

    def _find_lost_steps(
        self, counted: Sequence[Settlement], surviving: dict[str, float]
    ) -> list[tuple[int, int, LineageStarted]]:
        """First and last of the steps that count and are not there, with the lineage that began behind them."""
        newest: dict[str, int] = {}
        for each in counted:
            newest[each.lineage] = max(each.step, newest.get(each.lineage, 0))
        lost, reached = [], self._find_first_step(counted) - 1
        if self.begins_anywhere and not newest:
            return []
        for started in self._lineages:
            if started.lineage in surviving:
                last = int(min(started.parent_step, surviving[started.lineage]))
                if last > reached:
                    lost.append((reached + 1, last, started))
                reached = max(reached, last, newest.get(started.lineage, 0))
        return lost

    def _find_first_step(self, counted: Sequence[Settlement]) -> int:
        """The step that has to be the first of those that count; whichever is, where those before it were removed."""
        if self.begins_anywhere:
            return next((each.step for each in counted if not each.end), self._first_step)
        return self._first_step

    def count_trained(self) -> int:
        """Episodes that were trained by steps that count."""
        return sum(len(each.episodes) + each.closed_trained for each in self.list_settlements(Findings()))

    def count_void(self, counted: list[Settlement]) -> tuple[int, int]:
        """Episodes trained by steps that do not count, and how many of all that those settled were settled for good."""
        kept = {each.sequence for each in counted}
        void = [each for each in self._settlements if each.sequence not in kept]
        abandoned = sum(each.closed_trained + sum(each.closed_excluded.values()) for each in void)
        trained = sum(len(each.episodes) + each.closed_trained for each in void)
        return self._closed_void + trained, self._closed_abandoned + abandoned

    def close(self, closed: Collection[str], findings: Findings) -> None:
        """The floor has passed these episodes: forget them, and what is left of old steps but its sums."""
        counted = {each.sequence for each in self.list_settlements(findings)}
        for index, each in enumerate(self._settlements):
            stripped = each.close(closed)
            if stripped is not each and each.sequence not in counted:  # they count elsewhere
                self._closed_void += stripped.closed_trained - each.closed_trained
                stripped = msgspec.structs.replace(
                    stripped, closed_trained=each.closed_trained, closed_excluded=each.closed_excluded
                )
            self._settlements[index] = stripped
        self._merge_oldest(counted)

    def _merge_oldest(self, counted: Collection[int]) -> None:
        """Keep the sums of the oldest steps, those that do not count apart from those that do. A lineage that goes back further
        than to the steps that are kept one by one is not followed there."""
        while len(self._settlements) > MAX_SETTLEMENTS and not any(
            each.episodes or each.excluded or each.end for each in self._settlements[:2]
        ):
            first, second = self._settlements[:2]
            void = next((each for each in (first, second) if each.sequence not in counted), None)
            if void is not None:
                self._closed_void += void.closed_trained
                self._closed_abandoned += void.closed_trained + sum(void.closed_excluded.values())
                self._settlements.remove(void)
                continue
            if first.lineage == second.lineage and first.step >= second.step:
                break
            merged = msgspec.structs.replace(
                second,
                closed_trained=first.closed_trained + second.closed_trained,
                closed_excluded=dict(Counter(first.closed_excluded) + Counter(second.closed_excluded)),
            )
            self._settlements[:2] = [merged]
            self._first_step = merged.step

    def check_unsettled(self, episodes: Sequence[EpisodeAudit], settled: Settled, findings: Findings) -> None:
        """Of ``episodes``, which learners asked for here, those have to be settled that no learner will read again."""
        checkpoints, lost_before = self._list_counting_checkpoints(), self._find_lost_before()
        floors = list(accumulate((stored.floor for _, stored in checkpoints), max))
        for episode in episodes:
            index = bisect_right(floors, episode.requested)
            if episode.requested < lost_before:  # it may have been settled by steps that are lost
                continue
            if index < len(floors) and not 0 < settled.sequences.get(episode.episode_id, 0) < checkpoints[index][0]:
                findings.add("below_floor_unsettled", episode.episode_id, checkpoints[index][0])
        if self.is_over:
            self._check_finished(episodes, settled, findings)

    def _find_lost_before(self) -> int:
        """The position at which the newest lineage began that has lost steps before it; 0 if none has."""
        surviving = compute_surviving_steps(self._lineages)
        counted = [each for each in self._settlements if is_surviving(surviving, each.lineage, each.step)]
        return max((self._began[started.lineage] for _, _, started in self._find_lost_steps(counted, surviving)), default=0)

    def _check_finished(self, episodes: Sequence[EpisodeAudit], settled: Settled, findings: Findings) -> None:
        """Check that what was complete before the last step is settled; what was still played then may stay open."""
        groups: dict[str, list[EpisodeAudit]] = {}
        lost_before = self._find_lost_before()
        for episode in episodes:
            if not episode.stray and episode.requested >= lost_before:
                groups.setdefault(episode.group_id, []).append(episode)
        last_step = max((each.sequence for each in self._settlements if not each.end), default=0)
        for members in groups.values():
            is_whole = len(members) >= members[0].group_size
            if is_whole and all(0 < member.result_sequence < last_step for member in members):
                for member in members:
                    if member.episode_id not in settled.sequences:
                        findings.add("finished_unsettled", member.episode_id, self._settlements[-1].sequence)

    def _list_counting_checkpoints(self) -> list[tuple[int, CheckpointStored]]:
        surviving = compute_surviving_steps(self._lineages)
        return [each for each in self._checkpoints if is_surviving(surviving, each[1].lineage, each[1].step)]

    def _counts(self, settlement: Settlement, surviving: dict[str, float], newest: str) -> bool:
        if settlement.end:
            return settlement.lineage == newest
        return is_surviving(surviving, settlement.lineage, settlement.step)

    def _check_author(self, sequence: int, lineage: str, step: int, findings: Findings) -> None:
        if self.begins_anywhere and not self._lineages:
            self._lineages = complete_lineages(self._lineages, lineage)
        if not self.is_newest(lineage):
            findings.add("lineage_replaced", f"{lineage}/{step}", sequence)


class Settled:
    """Ids that training settled, each with where it was settled first."""

    def __init__(self) -> None:
        self.trained: dict[str, int] = {}
        self.excluded: dict[str, str] = {}
        self.sequences: dict[str, int] = {}
        self.trainings = 0
        self.exclusions: Counter[str] = Counter()

    def add(self, settlement: Settlement, findings: Findings) -> None:
        self.trainings += settlement.closed_trained
        self.exclusions.update(settlement.closed_excluded)
        for episode in settlement.episodes:
            self.trainings += 1
            if episode in self.trained:
                findings.add("trained_twice", episode, settlement.sequence)
            self.trained.setdefault(episode, settlement.sequence)
            self.sequences.setdefault(episode, settlement.sequence)
        for exclusion in settlement.excluded:
            self._exclude(exclusion, settlement.sequence, findings)

    def ids(self) -> Iterator[str]:
        yield from self.trained
        yield from self.excluded.keys() - self.trained.keys()

    def _exclude(self, exclusion: Exclusion, sequence: int, findings: Findings) -> None:
        self.exclusions[exclusion.reason or "(none)"] += 1
        if not exclusion.reason:
            findings.add("excluded_without_reason", exclusion.episode_id, sequence)
        if exclusion.episode_id in self.excluded:
            findings.add("excluded_twice", exclusion.episode_id, sequence)
        self.excluded.setdefault(exclusion.episode_id, exclusion.reason)
        self.sequences.setdefault(exclusion.episode_id, sequence)
