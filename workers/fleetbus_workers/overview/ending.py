"""Whether a run is over, since when, how it ended and how it goes on: from the last words in its log and who drives it. Pure.

A run that is over is not stuck: nobody waits for anything, however silent its server and its workers are.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Literal

import msgspec

from fleetbus_schemas import LineageStarted, Message, TrainingFinished, WorkerFailed, WorkerStarted, WorkerStopped
from fleetbus_workers.overview.wording import duration

How = Literal["finished", "stopped", "failed", "gone"]
"""``finished`` its training, ``stopped`` in order, ``failed`` with its learner, or ``gone`` without a goodbye."""

MORE_STEPS = 50
"""A finished run is trained on for as long again, or for this many steps."""


def _nobody_knows() -> bool | None:
    return None


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a run go on. ``is_driving`` says whether an `up` on this machine does so now, None if others may be;
    ``command`` is what resumes the run here, empty for a run whose workers are started one by one."""

    is_driving: Callable[[], bool | None] = _nobody_knows
    command: str = ""

    def way_on(self, how: How, step: int) -> str:
        if how == "finished":
            return f"`{self.command} --steps {more_steps(step)}` trains it further" if self.command else ""
        return f"`{self.command}` resumes it" if self.command else "start its workers again: it goes on from its checkpoint"


def more_steps(step: int) -> int:
    """Up to which step a run that finished at ``step`` may be trained next."""
    return step + max(step, MORE_STEPS)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, ``seconds`` ago. ``line`` says it, and how to go on, to a person."""

    how: How
    since_ns: int
    seconds: float
    line: str


class LastWords:
    """A fold of the log's training and life entries: what the newest learner said last, 0 and None if it has not."""

    def __init__(self) -> None:
        self.finished_ns = 0
        self.goodbye: WorkerStopped | WorkerFailed | None = None
        self.goodbye_ns = 0

    def apply(self, message: Message, time_ns: int) -> None:
        match message:
            case TrainingFinished():
                self.finished_ns = time_ns
            case LineageStarted():
                self.finished_ns = 0
                self.goodbye = None
            case WorkerStarted(role="learner"):
                self.goodbye = None
            case WorkerStopped(role="learner") | WorkerFailed(role="learner"):
                self.goodbye, self.goodbye_ns = message, time_ns


def judge_ending(
    words: LastWords, driver: Driver, *, is_silent: bool, is_anybody_alive: bool, last_time_ns: int, step: int, steps: int,
    now_ns: int,
) -> Ending | None:  # fmt: skip
    """The ending of a run, None while it goes on or may go on by itself.

    ``is_silent`` is a server that does not answer; ``last_time_ns`` the time of the newest entry that was read. A learner that
    said goodbye may be started again by an `up` that drives the run; one that said none may only be out of reach.
    """
    how, since_ns, cause = _found(words, driver, is_silent=is_silent, is_anybody_alive=is_anybody_alive)
    if how is None:
        return None
    since_ns = since_ns or last_time_ns
    seconds = max(now_ns - since_ns, 0) / 1e9 if since_ns else 0.0
    goal = f" of {steps}" if how != "finished" and steps > step else ""
    at = f"at step {step}{goal}" if step else "before its first step"
    parts = [f"over: {_SAID[how]}{_when(since_ns, seconds)} {at}{cause}", driver.way_on(how, step)]
    return Ending(how=how, since_ns=since_ns, seconds=seconds, line="; ".join(filter(None, parts)))


_SAID: dict[How, str] = {
    "finished": "its training finished",
    "stopped": "it was stopped in order",
    "failed": "its learner failed",
    "gone": "it ended",
}


def _found(words: LastWords, driver: Driver, *, is_silent: bool, is_anybody_alive: bool) -> tuple[How | None, int, str]:
    """How it ended, when (0: with its last entry) and of what."""
    if words.finished_ns:
        return "finished", words.finished_ns, ""
    if is_anybody_alive:
        return None, 0, ""
    is_driving = driver.is_driving()
    if words.goodbye is not None and (is_silent or not is_driving):
        if isinstance(words.goodbye, WorkerFailed):
            return "failed", words.goodbye_ns, f" ({words.goodbye.error_class}: {words.goodbye.error})"
        return "stopped", words.goodbye_ns, ""
    return ("gone" if is_driving is False else None), 0, " without a goodbye, as when it is killed"


def _when(since_ns: int, seconds: float) -> str:
    if not since_ns:
        return ""
    return f" {duration(seconds)} ago ({datetime.datetime.fromtimestamp(since_ns // 10**9, datetime.UTC):%Y-%m-%d %H:%M} UTC)"
