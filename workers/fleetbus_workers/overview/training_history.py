"""Steps, evaluations and ends of the training that counts: one fold for the page, the metrics, `up` and its summary. Pure.

A lineage that begins anew at an earlier step voids what came after it; curves lose those points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from fleetbus.core.lineage import complete_lineages, compute_surviving_steps, is_surviving
from fleetbus_schemas import EvaluationFinished, LineageStarted, Message, StepTrained, TrainingFinished


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One training step on the curves, with how many episodes and not which: a run may have 100,000 steps. ``time_ns`` is when
    it was stored; ``metrics`` are finite; ``reasons`` are those of the ``excluded``."""

    step: int
    version: int
    lineage: str
    time_ns: int
    episodes: int
    excluded: int
    reasons: dict[str, int]
    metrics: dict[str, float]


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation on the curves."""

    step: int
    version: int
    lineage: str
    name: str
    success: float
    mean_reward: float
    graded: int
    temperature: float
    time_ns: int = 0


class TrainingEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a lineage's training, and what it left out at last."""

    step: int
    lineage: str
    reasons: dict[str, int]


class TrainingHistory:
    """``keeps`` chooses the metrics that are remembered. ``steps``, ``evaluations`` and ``ends`` are those that count, in the
    order of the log; ``excluded`` counts the steps' episodes by reason."""

    def __init__(self, keeps: Callable[[str], bool] = lambda name: True) -> None:
        self._keeps = keeps
        self._lineages: list[LineageStarted] = []
        self._surviving: dict[str, float] = {}
        self._points: list[StepPoint | EvaluationPoint | TrainingEnd] = []
        self._forget()

    @property
    def is_finished(self) -> bool:
        """A lineage that resumes from a finished one is unfinished until its own last step."""
        return any(end.lineage == self._lineages[-1].lineage for end in self.ends)

    def apply(self, message: Message, time_ns: int) -> None:
        """Take in an entry, stored at ``time_ns``; other messages are ignored."""
        match message:
            case LineageStarted() if all(known.lineage != message.lineage for known in self._lineages):
                self._count_again([*self._lineages, message])
            case StepTrained():
                point = StepPoint(
                    step=message.step,
                    version=message.version,
                    lineage=message.lineage,
                    time_ns=time_ns,
                    episodes=len(message.episodes),
                    excluded=len(message.excluded),
                    reasons=_count_reasons(message),
                    metrics={
                        name: value for name, value in message.metrics.items() if self._keeps(name) and value - value == 0
                    },
                )
                self._add(point)
            case EvaluationFinished():
                names = [name for name in EvaluationPoint.__struct_fields__ if name != "time_ns"]
                self._add(EvaluationPoint(**{name: getattr(message, name) for name in names}, time_ns=time_ns))
            case TrainingFinished():
                self._add(TrainingEnd(step=message.step, lineage=message.lineage, reasons=_count_reasons(message)))

    def _add(self, point: StepPoint | EvaluationPoint | TrainingEnd) -> None:
        lineages = complete_lineages(self._lineages, point.lineage)
        if lineages is not self._lineages:  # what is read of the log begins after that lineage did
            self._count_again(lineages)
        self._points.append(point)
        self._count(point)

    def _count_again(self, lineages: list[LineageStarted]) -> None:
        self._lineages = lineages
        self._surviving = compute_surviving_steps(lineages)
        self._forget()
        for point in self._points:
            self._count(point)

    def _forget(self) -> None:
        self.steps: list[StepPoint] = []
        self.evaluations: list[EvaluationPoint] = []
        self.ends: list[TrainingEnd] = []
        self.excluded: Counter[str] = Counter()

    def _count(self, point: StepPoint | EvaluationPoint | TrainingEnd) -> None:
        if not is_surviving(self._surviving, point.lineage, point.step):
            return
        match point:
            case StepPoint():
                self.steps.append(point)
                self.excluded.update(point.reasons)
            case EvaluationPoint():
                self.evaluations.append(point)
            case TrainingEnd():
                self.ends.append(point)


def _count_reasons(message: StepTrained | TrainingFinished) -> dict[str, int]:
    return dict(Counter(exclusion.reason for exclusion in message.excluded))
