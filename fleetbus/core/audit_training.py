"""The audit of one learner's book: steps by lineage, of which only those of the surviving lineage count. Pure.

Which lineage survives is known at the end only, so steps are kept as ids until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from fleetbus.core.audit_findings import Findings
from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus_schemas import Exclusion, LineageStarted, StepTrained, TrainingFinished


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """One entry that settled episodes: a step, or the end of training."""

    sequence: int
    lineage: str
    step: int
    episodes: tuple[str, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    end: bool = False


class TrainingAudit:
    """One ``train.<name>``."""

    def __init__(self) -> None:
        self._lineages: list[LineageStarted] = []
        self._settlements: list[Settlement] = []

    @property
    def lineages(self) -> tuple[str, ...]:
        return tuple(started.lineage for started in self._lineages)

    def on_lineage(self, started: LineageStarted) -> None:
        self._lineages.append(started)

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
        """The settlements of the surviving lineage; its steps have to be 1, 2, 3 and so on.

        The end of training counts only for the newest lineage: a lineage that continues from there takes back what it excluded.
        """
        surviving = compute_surviving_steps(self._lineages)
        newest = self._lineages[-1].lineage if self._lineages else ""
        counted = [each for each in self._settlements if self._counts(each, surviving, newest)]
        steps = [each for each in counted if not each.end]
        for expected, each in enumerate(steps, start=1):
            if each.step != expected:
                findings.add("step_out_of_order", f"{each.lineage}/{each.step}", each.sequence)
        return counted

    def void(self, counted: list[Settlement]) -> Counter[str]:
        """Episodes trained by steps that do not count, and how often."""
        kept = {each.sequence for each in counted}
        return Counter(episode for each in self._settlements if each.sequence not in kept for episode in each.episodes)

    def _counts(self, settlement: Settlement, surviving: dict[str, float], newest: str) -> bool:
        if settlement.end:
            return settlement.lineage == newest
        return is_surviving(surviving, settlement.lineage, settlement.step)

    def _check_author(self, sequence: int, lineage: str, step: int, findings: Findings) -> None:
        if not self._lineages or self._lineages[-1].lineage != lineage:
            findings.add("lineage_replaced", f"{lineage}/{step}", sequence)


class Settled:
    """Ids that training settled, each with where it was settled first."""

    def __init__(self) -> None:
        self.trained: dict[str, int] = {}
        self.excluded: dict[str, str] = {}
        self.trainings = 0
        self.exclusions: Counter[str] = Counter()

    def add(self, settlement: Settlement, findings: Findings) -> None:
        for episode in settlement.episodes:
            self.trainings += 1
            if episode in self.trained:
                findings.add("trained_twice", episode, settlement.sequence)
            self.trained.setdefault(episode, settlement.sequence)
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
