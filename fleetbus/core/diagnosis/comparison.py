"""Two evaluations task by task: paired differences of reward and success, with intervals over tasks. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from fleetbus.core.diagnosis.intervals import Interval, find_mean_interval
from fleetbus.core.training.evaluation_summary import is_success
from fleetbus.errors import UserError
from fleetbus_schemas import GRADED, EpisodeFinished, Message

GREEDY = "_greedy"


class Graded(msgspec.Struct, frozen=True):
    """One graded held-out episode: the name of its evaluation, its task, its reward and if it succeeded."""

    evaluation: str
    task: str
    reward: float
    is_success: bool


class GradedFold:
    """The graded held-out episodes of a log, whose entries on ``episode.>`` are applied in order; each counts once."""

    def __init__(self, *, success_threshold: float) -> None:
        self._threshold = success_threshold
        self._found: dict[str, Graded] = {}

    def __len__(self) -> int:
        return len(self._found)

    def apply(self, message: Message | None, _sequence: int = 0, _time_ns: int = 0) -> None:
        """Note a result; other messages say nothing."""
        match message:
            case EpisodeFinished(split="eval", reward=float(reward)) as result if result.outcome in GRADED:
                evaluation = result.group_id.partition("-")[2]
                graded = Graded(evaluation, result.task_key, reward, is_success(result, self._threshold))
                self._found.setdefault(result.episode_id, graded)

    def build(self) -> list[Graded]:
        """In the order of the log."""
        return list(self._found.values())


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


def find_evaluation(source: str, wanted: str, graded: list[Graded]) -> tuple[str, list[Graded]]:
    """The name of one side, ``SOURCE@EVALUATION``, and its episodes; without one ``wanted`` the newest that was sampled.
    Raises `UserError` if there is no such evaluation."""
    names = list_evaluations(graded)
    chosen = wanted or choose_evaluation(names)
    if chosen is None or chosen not in names:
        known = ", ".join(names) or "none: it evaluated nothing"
        raise UserError(f"{source} has no graded evaluation {wanted or 'at all'}; it has {known}")
    return f"{source}@{chosen}", [each for each in graded if each.evaluation == chosen]


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
