"""The stages of an episode: each has its own time limit, is timed, and turns all that goes wrong into an outcome.

This is the boundary where a failing environment becomes data: any exception of an environment ends its episode, not the worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType

import anyio

from fleetbus.concurrency.deadlines import Deadline, Deadlines
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import Outcome
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.failure_location import clean_error, locate_error

DEADLINE_PASSED = "the episode's deadline passed: raise limits.episode"

_LIMITS = {"state": "step", "make": "open"}
"""The limits of stages that have none of their own name."""


def find_step_limit(environment: Environment, limits: LimitSettings) -> tuple[float, str]:
    """The seconds that a step of this environment may take, and the name of that limit."""
    if getattr(environment, "paces_itself", False):  # `PacesItself`, whose check as a protocol takes longer than a turn may
        return limits.episode, "episode"
    return limits.step, "step"


class EpisodeEnded(Exception):
    """The episode is over, for a reason that is not the policy's. ``location`` is the place in the environment's own code."""

    def __init__(self, outcome: Outcome, error_class: str, error: str = "", *, location: str = "") -> None:
        error = clean_error(error)
        super().__init__(f"{outcome}: {error_class}: {error}")
        self.outcome: Outcome = outcome
        self.error_class = to_printable(error_class)
        self.error = error
        self.location = location


class Superseded(Exception):
    """A newer claim or a result is in the log: this attempt stops and stores nothing."""


class Stages:
    """Seconds by stage, and the limits of the stages. ``ended_at`` is when the last stage ended, 0 before the first did.

    ``counters`` of the worker get ``begun_<stage>`` and ``ended_<stage>``: their difference is how many are in it now.
    """

    __slots__ = ("counters", "deadline", "deadlines", "ended_at", "now", "timings")

    def __init__(
        self,
        counters: MutableMapping[str, float] | None = None,
        deadlines: Deadlines | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.deadlines = deadlines
        """What runs the limits of stages, if they need no timers of their own."""
        self.counters = {} if counters is None else counters
        self.timings: dict[str, float] = {}
        self.ended_at = 0.0
        self.now = now or get_clock()
        self.deadline: Deadline | None = None
        """The deadline that is moved for a stage; without one every stage has a scope of its own."""

    def time_limit(
        self, stage: str, seconds: float, *, shield: bool = False, limit: str = ""
    ) -> AbstractContextManager[None, None]:
        """Run a stage for at most ``seconds``; raises `EpisodeEnded` with ``timeout`` or ``env_failed``.

        ``limit`` names the limit that ``seconds`` comes from if that is not the stage's own. After a stage that was late
        nothing more may be awaited within `deadline`.
        """
        return _TimeLimit(self, stage, seconds, limit or stage, shield=shield)

    def limit_step(self, environment: Environment, limits: LimitSettings) -> AbstractContextManager[None, None]:
        """The same for a step of an environment."""
        seconds, name = find_step_limit(environment, limits)
        return self.time_limit("step", seconds, limit=name)

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + 1.0


class _TimeLimit:
    """One stage: see `Stages.time_limit`."""

    __slots__ = ("_deadline", "_limit", "_scope", "_seconds", "_stage", "_stages", "_started")

    def __init__(self, stages: Stages, stage: str, seconds: float, limit: str, *, shield: bool) -> None:
        self._stages, self._stage, self._limit, self._seconds = stages, stage, limit, seconds
        self._started = stages.now()
        self._deadline = None if shield else stages.deadline
        self._scope: anyio.CancelScope | Deadline | None = None
        if self._deadline is None and stages.deadlines is not None and not shield:
            self._scope = stages.deadlines.open(self._started + seconds)
        elif self._deadline is None:
            self._scope = anyio.CancelScope(deadline=self._started + seconds, shield=shield)

    def __enter__(self) -> None:
        self._stages.count(f"begun_{self._stage}")
        if self._scope is not None:
            self._scope.__enter__()
        elif self._deadline is not None:
            self._deadline.move(self._started + self._seconds)

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        error = raised
        location = locate_error(find_root_cause(error)) if error is not None and self._is_late else ""
        if self._scope is not None:
            try:
                if self._scope.__exit__(kind, error, trace):
                    error = None
            except BaseException as remaining:  # noqa: BLE001 - of a group with a cancellation
                error = remaining
        elif self._deadline is not None:
            self._deadline.clear()
        self._record_end()
        if isinstance(error, (EpisodeEnded, Superseded, GeneratorExit)):
            return
        is_cancelled = isinstance(error, anyio.get_cancelled_exc_class()) if error is not None else False
        if self._scope is None or (error is None and self._scope.cancelled_caught):
            self._check_time(location, None if is_cancelled else error)
        if error is None:
            return
        if is_cancelled:
            if anyio.current_effective_deadline() > -math.inf:  # not cancelled by us: it came from a library on asyncio
                reason = f"{self._stage}: cancelled by a library, not by fleetbus"
                raise EpisodeEnded("env_failed", type(error).__name__, reason, location=locate_error(error)) from error
            return
        # foreign code may raise SystemExit or worse: it ends its episode, not the worker
        if _holds_cancellation(error):
            if error is not raised:
                raise error
            return
        self._check_time(location, error)  # raised because its time was up
        cause = find_root_cause(error)
        location = locate_error(cause)
        reason = f"{self._stage}: {describe_error(cause)}"
        raise EpisodeEnded("env_failed", type(cause).__name__, reason, location=location) from cause

    @property
    def _is_late(self) -> bool:
        return self._scope.cancel_called if self._scope is not None else self._deadline is not None and self._deadline.is_over

    def _record_end(self) -> None:
        stages = self._stages
        stages.count(f"ended_{self._stage}")
        stages.ended_at = stages.now()
        stages.timings[self._stage] = stages.timings.get(self._stage, 0.0) + stages.ended_at - self._started

    def _check_time(self, location: str, error: BaseException | None = None) -> None:
        """Raise if the stage was late, or the whole that it is a part of."""
        if not self._is_late:
            return
        if self._deadline is not None and self._deadline.is_whole_over:
            raise EpisodeEnded("timeout", "episode_timeout", DEADLINE_PASSED, location=location) from error
        reason = f"{self._limit} took longer than {self._seconds:g} s: raise limits.{_LIMITS.get(self._limit, self._limit)}"
        raise EpisodeEnded("timeout", f"{self._limit}_timeout", reason, location=location) from error


def describe_error(error: BaseException) -> str:
    """Its text; foreign exceptions may fail to give one."""
    try:
        return str(error)
    except Exception as unreadable:  # noqa: BLE001 - foreign exceptions may fail in any way
        return f"its text cannot be read ({type(unreadable).__name__})"


def to_printable(text: str) -> str:
    """Text as a result may carry it: encodable, and not longer than a reader wants."""
    return text[:1000].encode("utf-8", "replace").decode()


def _holds_cancellation(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(anyio.get_cancelled_exc_class()) is not None


def find_root_cause(error: BaseException) -> BaseException:
    """The first leaf of an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
