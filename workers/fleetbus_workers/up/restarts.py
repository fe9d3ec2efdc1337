"""Decides when a worker that ended may start again: back-off that doubles, and a bound after which the run has failed. Pure.

A crash counts by what was achieved since the one before, not by the clock: a learner that loads for minutes and dies in its
first step never crashes often within a minute, and never gets anywhere
(`docs/decisions/0180-restarts-count-by-what-was-achieved.md`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from fleetbus_schemas import GRADED, EpisodeFinished, EvaluationFinished, Heartbeat, Message, StepTrained

CRASHES_ALLOWED = 5
"""The fifth crash in a row of a worker that has achieved nothing new fails the run."""

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 5.0
REFUSED_PATIENCE_SECONDS = 600.0
"""A worker that has worked and cannot begin again, as while the server is away, is tried for so long."""

GOALS = {"learner": "a new training step", "environment": "a graded episode", "inference": "an action"}
"""What a worker has to achieve, by the first word of its name."""


class Achievements:
    """The achievements of a run's workers since `up` began, counted from its log and their heartbeats. A learner achieves a
    step that none of its predecessors reached: one that was trained before, and lost, is not counted again.

    ``workers`` are the names of the plans: whoever has a key of a role may invent as many workers of it as he likes.
    """

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self.workers = tuple(workers)
        self._achieved: Counter[str] = Counter()
        """By the name of the plan; of all workers that `up` did not start under an empty one."""
        self._sampled: dict[str, tuple[str, float]] = {}
        """By the name of the plan the worker that was heard last, and its actions."""
        self._furthest: defaultdict[str, int] = defaultdict(int)
        """By the name of the learner."""
        self._evaluations: set[tuple[int, str]] = set()

    def apply(self, message: Message, learner: str = "learner") -> None:
        """Take in an entry of the log; ``learner``: whose it is, if it is one of a learner."""
        match message:
            case StepTrained():
                self._furthest[learner] = max(self._furthest[learner], message.step)
            case EvaluationFinished():
                self._evaluations.add((message.step, message.name))
            case EpisodeFinished() if message.outcome in GRADED:
                self._achieved[self._find_plan("environment", message.worker)] += 1

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """Take in a heartbeat: other actions than before are an achievement, and no number of them keeps later ones from it."""
        actions = beat.counters.get("actions", 0.0)
        if beat.role != "inference" or not actions:
            return
        plan, sampled = self._find_plan(beat.role, beat.worker), (beat.worker, actions)
        if self._sampled.get(plan) != sampled:
            self._sampled[plan] = sampled
            self._achieved[plan] += 1

    def count(self, name: str) -> float:
        """Of a worker by the name of its plan, in all its starts; of whatever is no worker, such as the server, of all."""
        learned = {name: float(step) for name, step in self._furthest.items()}
        learned["learner"] = learned.get("learner", 0.0) + len(self._evaluations)
        role = name.partition("-")[0]
        if role == "learner":
            return learned.get(name, 0.0)
        return float(self._achieved[name]) if role in GOALS else sum(learned.values()) + self._achieved.total()

    def _find_plan(self, role: str, worker: str) -> str:
        return next((each for each in self.workers if each.partition("-")[0] == role and is_start_of(each, worker)), "")


def describe_failure(name: str) -> str:
    """Describe why a worker of this name is given up."""
    return f"{CRASHES_ALLOWED} crashes in a row without {GOALS.get(name.partition('-')[0], 'any progress of the run')}"


def name_start(name: str, start: int) -> str:
    """The name of a plan's worker in its ``start``-th start, 0 first: it does not own the leases of its predecessor."""
    return f"{name}-{start}" if start else name


def is_start_of(name: str, worker: str) -> bool:
    """True if a worker is a start of the plan called ``name``."""
    return worker == name or (worker.startswith(f"{name}-") and worker.removeprefix(f"{name}-").isdecimal())


def is_successor(worker: str, before: str) -> bool:
    """True if a worker is ``before``, or another start of the same plan."""
    name, _, start = before.rpartition("-")
    return worker == before or is_start_of(before, worker) or (start.isdecimal() and is_start_of(name, worker))


class RestartBudget:
    """The crashes of one worker."""

    def __init__(self) -> None:
        self._crashes = 0
        self._achieved = 0.0
        self._refused_since: float | None = None

    def delay_after_crash(self, achieved: float) -> float | None:
        """Seconds to wait before the next start, or None when there have been too many crashes since ``achieved`` grew last."""
        self._refused_since = None
        if achieved > self._achieved:
            self._achieved, self._crashes = achieved, 0
        self._crashes += 1
        if self._crashes >= CRASHES_ALLOWED:
            return None
        return float(min(FIRST_DELAY_SECONDS * 2 ** (self._crashes - 1), LONGEST_DELAY_SECONDS))

    def delay_after_refusal(self, now_seconds: float, *, has_worked: bool) -> float | None:
        """The same for a worker that refuses to start, by the clock: None if it never worked or has refused for too long."""
        if self._refused_since is None:
            self._refused_since = now_seconds
        if not has_worked or now_seconds - self._refused_since > REFUSED_PATIENCE_SECONDS:
            return None
        return LONGEST_DELAY_SECONDS
