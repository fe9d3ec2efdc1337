"""Summary of a run, folded from its log: the steps, evaluations and exclusions of the lineage that survived. Pure.

Counts of episodes by outcome and their seconds are of all that were played, also by lineages that were cut off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus_schemas import (
    EpisodeFinished,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)
from fleetbus_workers.overview.formatting import STAGE_PREFIX


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the summary needs of a step: how many episodes and not which, and few of its metrics. A run may have 100,000."""

    lineage: str
    step: int
    trained: int
    excluded: dict[str, int]
    metrics: dict[str, float]


E = TypeVar("E", StepSummary, EvaluationFinished, TrainingFinished)

_KEPT_METRICS = frozenset({"reward", "success", "staleness_max", "logprob_difference_max"})


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run as ``summary.json`` holds it.

    Successes are shares of held-out episodes, None if they were not measured. ``seconds_by_stage`` sums the learner's stages
    over the steps, and the stages of all episodes (``episode_...``; they run beside each other). ``wall_seconds`` is how long
    the last `up` took. ``signal`` says that nothing was learned at the end, if so, and since when. The rewards and successes
    per step are what the picture shows.
    """

    run: str
    seed: int
    finished: bool
    success_start: float | None
    success_end: float | None
    success_end_greedy: float | None
    optimizer_steps: int
    episodes_trained: int
    episodes_excluded: dict[str, int]
    episodes_by_outcome: dict[str, int]
    policy_versions: int
    max_staleness_seen: int
    max_logprob_difference: float | None
    wall_seconds: float
    seconds_by_stage: dict[str, float]
    signal: str = ""
    steps: list[int]
    reward_by_step: list[float | None]
    success_by_step: list[float | None]


class SummaryBuilder:
    """The fold. Entries come in the order of the log."""

    def __init__(self) -> None:
        self._lineages: list[LineageStarted] = []
        self._steps: list[StepSummary] = []
        self._evaluations: list[EvaluationFinished] = []
        self._finishes: list[TrainingFinished] = []
        self._outcomes: Counter[str] = Counter()
        self._episode_seconds: Counter[str] = Counter()
        self._versions = 0

    def apply(self, message: Message) -> None:
        """Take in one entry of the log."""
        match message:
            case LineageStarted():
                self._lineages.append(message)
            case StepTrained():
                self._steps.append(_summarize_step(message))
            case EvaluationFinished():
                self._evaluations.append(message)
            case TrainingFinished():
                self._finishes.append(message)
            case PolicyPublished():
                self._versions += 1
            case EpisodeFinished():
                self._outcomes[message.outcome] += 1
                self._episode_seconds.update(message.timings)

    def summary(self, *, run: str, seed: int, wall_seconds: float) -> Summary:
        """The result so far."""
        steps = self._filter_surviving(self._steps)
        evaluations = {evaluation.name: evaluation.success for evaluation in self._filter_surviving(self._evaluations)}
        excluded: Counter[str] = Counter()
        for step in steps:
            excluded.update(step.excluded)
        for last in self._filter_surviving(self._finishes):
            excluded.update(exclusion.reason for exclusion in last.excluded)
        return Summary(
            run=run,
            seed=seed,
            finished=self._is_finished(),
            success_start=evaluations.get("start"),
            success_end=evaluations.get("end"),
            success_end_greedy=evaluations.get("end_greedy"),
            optimizer_steps=len(steps),
            episodes_trained=sum(step.trained for step in steps),
            episodes_excluded=dict(excluded),
            episodes_by_outcome=dict(self._outcomes),
            policy_versions=self._versions,
            max_staleness_seen=round(max(_collect_metric(steps, "staleness_max"), default=0)),
            max_logprob_difference=max(_collect_metric(steps, "logprob_difference_max"), default=None),
            wall_seconds=round(wall_seconds, 3),
            seconds_by_stage=self._compute_stage_seconds(steps),
            steps=[step.step for step in steps],
            reward_by_step=_build_curve(steps, "reward"),
            success_by_step=_build_curve(steps, "success"),
        )

    def _filter_surviving(self, entries: Sequence[E]) -> list[E]:
        surviving = compute_surviving_steps(self._lineages)
        return [entry for entry in entries if is_surviving(surviving, entry.lineage, entry.step)]

    def _is_finished(self) -> bool:
        """A lineage that resumes from a finished one is unfinished until its own last step."""
        newest = self._lineages[-1].lineage if self._lineages else None
        return any(entry.lineage == newest for entry in self._finishes)

    def _compute_stage_seconds(self, steps: Sequence[StepSummary]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for step in steps:
            stages = {key: value for key, value in step.metrics.items() if key.startswith(STAGE_PREFIX)}
            total.update({key.removeprefix(STAGE_PREFIX): value for key, value in stages.items()})
        total.update({f"episode_{stage}": seconds for stage, seconds in self._episode_seconds.items()})
        return {stage: round(seconds, 3) for stage, seconds in total.items()}


def _summarize_step(step: StepTrained) -> StepSummary:
    return StepSummary(
        lineage=step.lineage,
        step=step.step,
        trained=len(step.episodes),
        excluded=dict(Counter(exclusion.reason for exclusion in step.excluded)),
        metrics={key: value for key, value in step.metrics.items() if key in _KEPT_METRICS or key.startswith(STAGE_PREFIX)},
    )


def _build_curve(steps: Sequence[StepSummary], metric: str) -> list[float | None]:
    """The metric of every step, None where it was not measured."""
    values = (step.metrics.get(metric, math.nan) for step in steps)
    return [value if math.isfinite(value) else None for value in values]


def _collect_metric(steps: Sequence[StepSummary], metric: str) -> list[float]:
    return [value for value in _build_curve(steps, metric) if value is not None]
