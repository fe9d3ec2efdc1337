"""Steps, evaluations and ends of the training that counts: one fold for the page, the metrics, `up` and its summary. Pure.

A lineage that begins anew at an earlier step voids what came after it; curves lose those points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from fleetbus.core.training.lineage import complete_lineages, compute_surviving_steps, is_surviving
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
    success_of_all: float = math.nan
    tasks: int = 0
    time_ns: int = 0


class TrainingEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a lineage's training, and what it left out at last."""

    step: int
    lineage: str
    reasons: dict[str, int]


class TrainingHistory:
    """``keeps`` chooses the metrics that are remembered. ``steps``, ``evaluations`` and ``ends`` are those that count, in the
    order of the log; ``excluded`` counts the steps' episodes by reason. What a new lineage voids is found when they are asked
    for: a fold of a long log with many restarts would count all points once per restart."""

    def __init__(self, keeps: Callable[[str], bool] = lambda name: True) -> None:
        self._keeps = keeps
        self._lineages: list[LineageStarted] = []
        self._names: set[str] = set()
        self._surviving: dict[str, float] = {}
        self._points: list[StepPoint | EvaluationPoint | TrainingEnd] = []
        self._is_counted = False
        self._count_all()

    @property
    def steps(self) -> list[StepPoint]:
        self._count_all()
        return self._steps

    @property
    def evaluations(self) -> list[EvaluationPoint]:
        self._count_all()
        return self._evaluations

    @property
    def ends(self) -> list[TrainingEnd]:
        self._count_all()
        return self._ends

    @property
    def excluded(self) -> Counter[str]:
        self._count_all()
        return self._excluded

    @property
    def is_finished(self) -> bool:
        """A lineage that resumes from a finished one is unfinished until its own last step."""
        return any(end.lineage == self._lineages[-1].lineage for end in self.ends)

    @property
    def newest_learner(self) -> str:
        """The worker that began the newest lineage; empty if the log does not say."""
        return self._lineages[-1].worker if self._lineages else ""

    def apply(self, message: Message, time_ns: int) -> None:
        """Take in an entry, stored at ``time_ns``; other messages are ignored."""
        match message:
            case LineageStarted() if message.lineage not in self._names:
                self._lineages.append(message)
                self._names.add(message.lineage)
                self._is_counted = False
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
        if point.lineage not in self._names:  # what is read of the log begins after that lineage did
            self._lineages = complete_lineages(self._lineages, point.lineage)
            self._names.add(point.lineage)
            self._is_counted = False
        self._points.append(point)
        if self._is_counted:
            self._count(point)

    def _count_all(self) -> None:
        """Unless that is done, and no lineage began since."""
        if self._is_counted:
            return
        self._surviving = compute_surviving_steps(self._lineages)
        self._steps: list[StepPoint] = []
        self._evaluations: list[EvaluationPoint] = []
        self._ends: list[TrainingEnd] = []
        self._excluded: Counter[str] = Counter()
        for point in self._points:
            self._count(point)
        self._is_counted = True

    def _count(self, point: StepPoint | EvaluationPoint | TrainingEnd) -> None:
        if not is_surviving(self._surviving, point.lineage, point.step):
            return
        match point:
            case StepPoint():
                self._steps.append(point)
                self._excluded.update(point.reasons)
            case EvaluationPoint():
                self._evaluations.append(point)
            case TrainingEnd():
                self._ends.append(point)


def _count_reasons(message: StepTrained | TrainingFinished) -> dict[str, int]:
    return dict(Counter(exclusion.reason for exclusion in message.excluded))
