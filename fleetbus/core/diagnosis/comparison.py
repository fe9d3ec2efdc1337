"""Two evaluations task by task: paired differences of reward and success, with intervals over tasks. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from fleetbus.core.diagnosis.intervals import Interval, find_mean_interval

GREEDY = "_greedy"


class Graded(msgspec.Struct, frozen=True):
    """One graded held-out episode: the name of its evaluation, its task, its reward and if it succeeded."""

    evaluation: str
    task: str
    reward: float
    is_success: bool


class TaskDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One task in both: the mean reward in each, and how many episodes that is of."""

    task: str
    one: float
    other: float
    episodes: tuple[int, int]

    @property
    def difference(self) -> float:
        return self.other - self.one


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``other`` less ``one``. ``reward`` and ``success`` are means over ``tasks`` with 95 % intervals; None without a task in
    both. ``only_one`` and ``only_other`` count tasks that the other side did not grade."""

    one: str
    other: str
    tasks: tuple[TaskDifference, ...]
    reward: Interval | None
    success: Interval | None
    only_one: int
    only_other: int


def list_evaluations(graded: Iterable[Graded]) -> list[str]:
    """Names of evaluations, the newest last; ``graded`` are in the order of the log."""
    return list({each.evaluation: None for each in graded})


def choose_evaluation(names: list[str]) -> str | None:
    """The newest that was sampled, else the newest."""
    sampled = [name for name in names if not name.endswith(GREEDY)]
    return (sampled or names)[-1] if names else None


def compare(one: list[Graded], other: list[Graded], *, names: tuple[str, str]) -> Comparison:
    """Compare the episodes of two evaluations, which are called ``names``."""
    rewards = _gather(one), _gather(other)
    both = [task for task in rewards[0] if task in rewards[1]]
    found = [_build_difference(task, rewards[0][task], rewards[1][task]) for task in both]
    gains = [_mean(e.is_success for e in rewards[1][task]) - _mean(e.is_success for e in rewards[0][task]) for task in both]
    return Comparison(
        one=names[0],
        other=names[1],
        tasks=tuple(sorted(found, key=lambda each: (each.difference, each.task))),
        reward=find_mean_interval([each.difference for each in found]) if found else None,
        success=find_mean_interval(gains) if found else None,
        only_one=len(rewards[0]) - len(both),
        only_other=len(rewards[1]) - len(both),
    )


def _gather(graded: list[Graded]) -> dict[str, list[Graded]]:
    found: defaultdict[str, list[Graded]] = defaultdict(list)
    for each in graded:
        if math.isfinite(each.reward):
            found[each.task].append(each)
    return found


def _build_difference(task: str, one: list[Graded], other: list[Graded]) -> TaskDifference:
    means = [_mean(each.reward for each in side) for side in (one, other)]
    return TaskDifference(task=task, one=means[0], other=means[1], episodes=(len(one), len(other)))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)
