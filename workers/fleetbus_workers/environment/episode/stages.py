"""The stages of an episode: each has its own time limit, is timed, and turns whatever goes wrong into an outcome.

This is the boundary where a failing environment becomes data: any exception of an environment ends its episode, not the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import anyio

from fleetbus_schemas import Outcome
from fleetbus_workers.environment.failure_location import locate_error


class EpisodeEnded(Exception):
    """The episode is over, for a reason that is not the policy's. ``location`` is the place in the environment's own code."""

    def __init__(self, outcome: Outcome, error_class: str, error: str = "", *, location: str = "") -> None:
        super().__init__(f"{outcome}: {error_class}: {error}")
        self.outcome: Outcome = outcome
        self.error_class = error_class
        self.error = to_printable(error)
        self.location = location


class Superseded(Exception):
    """A newer claim or a result is in the log: this attempt stops and stores nothing."""


class Stages:
    """Seconds by stage, and the limits of the stages. ``ended_at`` is when the last stage ended, 0 before the first did.

    ``counters`` of the worker get ``begun_<stage>`` and ``ended_<stage>``: their difference is how many are in it now.
    """

    def __init__(self, counters: MutableMapping[str, float] | None = None) -> None:
        self._counters = {} if counters is None else counters
        self.timings: dict[str, float] = {}
        self.ended_at = 0.0

    @contextmanager
    def time_limit(self, stage: str, seconds: float, *, shield: bool = False, limit: str = "") -> Iterator[None]:
        """Run a stage for at most ``seconds``; raises `EpisodeEnded` with ``timeout`` or ``env_failed``.

        ``limit`` names the limit that ``seconds`` comes from if that is not the stage's own.
        """
        started = anyio.current_time()
        location = ""
        self._count(f"begun_{stage}")
        try:
            with anyio.move_on_after(seconds, shield=shield) as scope:
                try:
                    yield
                except anyio.get_cancelled_exc_class() as cancelled:
                    location = locate_error(cancelled) if scope.cancel_called else ""
                    raise
        except (EpisodeEnded, Superseded):
            raise
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() > -math.inf:  # not cancelled by us: it came from a library on asyncio
                raise EpisodeEnded(
                    "env_failed",
                    type(error).__name__,
                    f"{stage}: cancelled by a library, not by fleetbus",
                    location=locate_error(error),
                ) from error
            raise
        except GeneratorExit:
            raise
        except BaseException as error:  # foreign code may raise SystemExit or worse: it ends its episode, not the worker
            if _holds_cancellation(error):
                raise
            if scope.cancel_called:  # raised because its time was up
                raise _build_timeout(limit or stage, seconds, locate_error(find_root_cause(error))) from error
            cause = find_root_cause(error)
            location = locate_error(cause)
            raise EpisodeEnded("env_failed", type(cause).__name__, f"{stage}: {cause}", location=location) from cause
        finally:
            self._count(f"ended_{stage}")
            self.ended_at = anyio.current_time()
            self.timings[stage] = self.timings.get(stage, 0.0) + self.ended_at - started
        if scope.cancelled_caught:
            raise _build_timeout(limit or stage, seconds, location)

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + 1.0


def _build_timeout(stage: str, seconds: float, location: str) -> EpisodeEnded:
    return EpisodeEnded("timeout", f"{stage}_timeout", f"{stage} took longer than {seconds:g} s", location=location)


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
