"""Summary of a run as ``summary.json`` holds it: the steps, evaluations and exclusions of the training that counts. Pure.

Counts of episodes by outcome and their seconds are of all that were played, also by lineages that were cut off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import msgspec

from fleetbus.core.training.evaluation_summary import find_interval
from fleetbus_workers.observe.run.formatting import STAGE_PREFIX
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.observe.run.training_history import StepPoint

_KEPT_METRICS = frozenset({"reward", "success", "staleness_max", "logprob_difference_max", "logprob_difference_mean"})


def is_summarized(metric: str) -> bool:
    """True if the summary needs this metric of every step."""
    return metric in _KEPT_METRICS or metric.startswith(STAGE_PREFIX)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run as ``summary.json`` holds it.

    Successes are shares of held-out episodes with a reward of at least ``evaluation.success_threshold``, ``reward_start`` and
    its like their mean rewards; None if they were not measured. ``success_of_all`` are the shares of all episodes, graded or
    not, by evaluation. ``intervals`` are the 95 % intervals of the successes by the name of the evaluation,
    ``evaluated_tasks`` how many different tasks were played (0: not known). ``seconds_by_stage`` sums the learner's stages over
    the steps, and the stages of all episodes (``episode_...``; they run beside each other). ``wall_seconds`` is how long the
    last `up` took. ``signal`` says that nothing was learned at the end, if so, and since when; ``signal_kind`` is that of
    `SignalDiagnosis`. The rewards and successes per step are what the picture shows. ``policies`` are the summaries of the
    policies of seats that learners of their own train, with the rewards of their seats; the run is ``finished`` when all are.
    Log-probability differences are between sampler and trainer on the tokens of the newest version, in nats: the most of any
    token, and the mean over steps of their means.
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
    signal_kind: str = ""
    success_start_greedy: float | None = None
    intervals: dict[str, tuple[float, float]] = {}
    evaluated_tasks: int = 0
    reward_start: float | None = None
    reward_end: float | None = None
    reward_end_greedy: float | None = None
    steps: list[int]
    reward_by_step: list[float | None]
    success_by_step: list[float | None]
    success_of_all: dict[str, float] = {}
    mean_logprob_difference: float | None = None
    policies: dict[str, Summary] = {}


def build_summary(progress: Progress, *, run: str, seed: int, wall_seconds: float) -> Summary:
    """The result so far, from a ``progress`` that has taken in the log and keeps what `is_summarized`."""
    training, steps = progress.training, progress.training.steps
    measured = [evaluation for evaluation in training.evaluations if evaluation.graded]
    evaluations = {evaluation.name: evaluation.success for evaluation in measured}
    rewards = {evaluation.name: evaluation.mean_reward for evaluation in measured}
    excluded = Counter(training.excluded)
    for end in training.ends:
        excluded.update(end.reasons)
    seconds: Counter[str] = Counter()
    for step in steps:
        seconds.update(
            {key.removeprefix(STAGE_PREFIX): value for key, value in step.metrics.items() if key.startswith(STAGE_PREFIX)}
        )
    seconds.update({f"episode_{stage}": spent for stage, spent in progress.episode_seconds.items()})
    return Summary(
        run=run,
        seed=seed,
        finished=progress.is_finished,
        success_start=evaluations.get("start"),
        success_end=evaluations.get("end"),
        success_end_greedy=evaluations.get("end_greedy"),
        success_start_greedy=evaluations.get("start_greedy"),
        intervals={each.name: find_interval(each.success, each.graded, each.tasks) for each in measured},
        evaluated_tasks=max((each.tasks for each in measured), default=0),
        reward_start=rewards.get("start"),
        reward_end=rewards.get("end"),
        reward_end_greedy=rewards.get("end_greedy"),
        optimizer_steps=len(steps),
        episodes_trained=sum(step.episodes for step in steps),
        episodes_excluded=dict(excluded),
        episodes_by_outcome=dict(progress.outcomes),
        policy_versions=progress.versions,
        max_staleness_seen=round(max(_collect_metric(steps, "staleness_max"), default=0)),
        max_logprob_difference=max(_collect_metric(steps, "logprob_difference_max"), default=None),
        mean_logprob_difference=fmean(means) if (means := _collect_metric(steps, "logprob_difference_mean")) else None,
        wall_seconds=round(wall_seconds, 3),
        seconds_by_stage={stage: round(spent, 3) for stage, spent in seconds.items()},
        steps=[step.step for step in steps],
        reward_by_step=[step.metrics.get("reward") for step in steps],
        success_by_step=[step.metrics.get("success") for step in steps],
        success_of_all={each.name: each.success_of_all for each in measured if math.isfinite(each.success_of_all)},
        policies={
            policy: build_summary(other, run=run, seed=seed, wall_seconds=wall_seconds)
            for policy, other in progress.others.items()
        },
    )


def _collect_metric(steps: Sequence[StepPoint], metric: str) -> list[float]:
    return [step.metrics[metric] for step in steps if metric in step.metrics]
