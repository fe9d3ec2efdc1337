"""Metrics of a batch of groups before it is trained; success of one step is that of its few tasks (docs/decisions/0177)."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
import structlog

from fleetbus.core.algorithms.reward_components import MAX_COMPONENTS, MAX_NAME_CHARACTERS, find_reward_problem
from fleetbus.core.training.evaluation_summary import is_success
from fleetbus.core.training.groups import Group
from fleetbus.core.training.learning_signal import LearningSignal
from fleetbus.core.training.rewarded_parts import has_no_signal, list_rewards
from fleetbus.core.training.task_losses import TaskLosses
from fleetbus_schemas import EpisodeFinished, EvaluationFinished, StepTrained
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.pool import GroupPool

MAX_COMPONENT = 1e100
"""Largest size of a component that enters a mean: sums of a batch stay finite."""

MAX_MEANS = 8 * MAX_COMPONENTS
"""Of components, in one step: tasks of several environments have their own."""

ADVANTAGES = ("advantage_min", "advantage_max", "advantage_size_mean", "advantage_moment")

log = structlog.get_logger()


def measure_groups(
    groups: Sequence[Group], pool: GroupPool, *, step: int, max_staleness: int, success_threshold: float
) -> dict[str, float]:
    """`compute_group_metrics` of groups of the pool, trained after ``step`` steps; stale ones are logged."""
    lags = [pool.lag(group, step) for group in groups]
    queued = [pool.steps_queued(group, step) for group in groups]
    measured = compute_group_metrics(groups, lags, queued, max_staleness=max_staleness, success_threshold=success_threshold)
    if measured["groups_late"]:
        log.warning("training on stale groups", groups=measured["groups_late"], lag=max(lags), step=step)
    return measured


def compute_group_metrics(
    groups: Sequence[Group],
    lags: Sequence[int],
    queued: Sequence[int] | None = None,
    *,
    max_staleness: int | None = None,
    success_threshold: float = 1.0,
) -> dict[str, float]:
    """Reward, success (see `is_success`), staleness, turns and tool errors of a batch.

    ``lags`` are steps, one per group, ``queued`` the part of each that passed between its last result and its batch; the rest
    passed in flight. ``groups_late`` counts groups beyond ``max_staleness``.
    """
    queued = queued or [0] * len(lags)
    results = [result for group in groups for result in group.graded]
    rewards = [result.reward for result in results if result.reward is not None]
    flat = sum(has_no_signal(map(list_rewards, group.graded)) for group in groups)
    return {
        "reward": statistics.fmean(rewards),
        "success": statistics.fmean(float(is_success(result, success_threshold)) for result in results),
        "staleness_max": max(lags),
        "staleness_mean": statistics.fmean(lags),
        "staleness_in_flight_mean": statistics.fmean(lag - waited for lag, waited in zip(lags, queued, strict=True)),
        "staleness_in_queue_mean": statistics.fmean(queued),
        "groups_late": sum(lag > max_staleness for lag in lags) if max_staleness is not None else 0,
        "episodes": len(results),
        "groups_without_signal": flat,
        "turns": statistics.fmean(result.turns for result in results),
        "tool_errors": sum(result.tool_errors for result in results),
    } | measure_components(results)


def measure_components(results: Sequence[EpisodeFinished]) -> dict[str, float]:
    """The mean of each component of rewards, as ``reward_NAME``, and of each seat's reward, as ``reward_of_SEAT``, over the
    episodes that have it: of the `MAX_MEANS` that most have, without values and names that no environment may give. One worker
    that writes such would spoil the step's entry."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        seats = ((f"of_{seat.name}", seat.reward) for seat in result.seats if seat.reward is not None)
        for name, value in chain(result.reward_components.items(), seats):
            if len(name) <= MAX_NAME_CHARACTERS and not find_reward_problem([value], MAX_COMPONENT):
                values[f"reward_{name}"].append(value)
    most = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_MEANS]
    return {name: statistics.fmean(values[name]) for name in sorted(most)}


def compute_advantage_metrics(sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """The advantages of a batch over its sampled tokens, so that a replay can tell whether they are the same; all 0 if no token
    is trained.

    ``advantage_moment`` is the mean of advantage times place in the batch (0 to 1): the same advantages given to other
    episodes have the same extremes and the same mean size, but not the same moment.
    """
    found = np.concatenate([sequence.advantages[sequence.loss_mask] for sequence in sequences])
    if not len(found):
        return dict.fromkeys(ADVANTAGES, 0.0)
    return {
        "advantage_min": float(found.min()),
        "advantage_max": float(found.max()),
        "advantage_size_mean": float(np.abs(found).mean()),
        "advantage_moment": float((found.astype(np.float64) * np.linspace(0.0, 1.0, len(found))).mean()),
    }


def round_shares(evaluated: EvaluationFinished) -> dict[str, float]:
    """The successes of an evaluation for a log line: of graded episodes, and of all."""
    return {"success": round(evaluated.success, 3), "success_of_all": round(evaluated.success_of_all, 3)}


LOSSES_STEPS = 10
"""Steps between two words on tasks that lose episodes."""


class SignalLog:
    """Takes every step of this learner's lineage as it is trained."""

    def __init__(self) -> None:
        self._signal = LearningSignal()
        self._logged_kind = ""

    def record_step(self, step: StepTrained, now_ns: int, losses: TaskLosses) -> None:
        """Log what there is to say of the step; tasks that lose episodes every `LOSSES_STEPS` steps."""
        if step.step % LOSSES_STEPS == 0 and (losing := losses.describe()):
            log.warning(losing, step=step.step, advice="see episode.timeout_reward and learner.stale_groups")
        self._signal.apply(step, now_ns)
        found = self._signal.latest
        kind = found.kind if found is not None else ""
        if kind == self._logged_kind:
            return
        self._logged_kind = kind
        if found is None:
            log.info("learning signal has returned", step=step.step)
        elif found.kind == "solved":
            log.info(found.reason, advice=found.advice)
        else:
            log.warning(found.reason, advice=found.advice)
