"""Decides when a worker that ended may start again: back-off that doubles, and a bound after which the run has failed. Pure.

A crash counts by what was achieved since the one before, not by the clock: a learner that loads for minutes and dies in its
first step never crashes often within a minute, and never gets anywhere
(`docs/decisions/0180-restarts-count-by-what-was-achieved.md`).
"""

from collections import defaultdict

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
    step that none of its predecessors reached: one that was trained before, and lost, is not counted again."""

    def __init__(self) -> None:
        self._by_worker: defaultdict[str, float] = defaultdict(float)
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
                self._by_worker[message.worker] += 1

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """Take in a heartbeat: actions are counted by who sampled them."""
        if beat.role == "inference":
            self._by_worker[beat.worker] = max(self._by_worker[beat.worker], beat.counters.get("actions", 0.0))

    def count(self, name: str) -> float:
        """Of a worker by the name of its plan, in all its starts; of whatever is no worker, such as the server, of all."""
        learned = {name: float(step) for name, step in self._furthest.items()}
        learned["learner"] = learned.get("learner", 0.0) + len(self._evaluations)
        role = name.partition("-")[0]
        if role == "learner":
            return learned.get(name, 0.0)
        if role not in GOALS:
            return sum(learned.values()) + sum(self._by_worker.values())
        return sum(count for worker, count in self._by_worker.items() if is_start_of(name, worker))


def describe_failure(name: str) -> str:
    """Describe why a worker of this name is given up."""
    return f"{CRASHES_ALLOWED} crashes in a row without {GOALS.get(name.partition('-')[0], 'any progress of the run')}"


def name_start(name: str, start: int) -> str:
    """The name of a plan's worker in its ``start``-th start, 0 first: it does not own the leases of its predecessor."""
    return f"{name}-{start}" if start else name


def is_start_of(name: str, worker: str) -> bool:
    """True if a worker is a start of the plan called ``name``."""
    return worker == name or (worker.startswith(f"{name}-") and worker.removeprefix(f"{name}-").isdecimal())


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
