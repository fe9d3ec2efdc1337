"""Detects the end of a run, its time, its kind and the command that resumes it: from the last entries and its driver. Pure.

A run that is over is not stuck, even if its server and workers are silent.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Literal

import msgspec

from fleetbus_schemas import LineageStarted, Message, TrainingFinished, WorkerFailed, WorkerStarted, WorkerStopped
from fleetbus_workers.observe.run.formatting import format_duration

TerminationKind = Literal["finished", "stopped", "failed", "gone"]
"""``finished`` its training, ``stopped`` in order, ``failed`` with its learner, or ``gone`` without a stop message."""

MORE_STEPS = 50
"""A finished run is trained on for as long again, or for this many steps."""


def _return_unknown() -> bool | None:
    return None


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The process that keeps a run going. ``is_driving`` says whether an `up` on this machine does so now, None if others may
    be; ``command`` is the command that resumes the run here, empty for a run whose workers are started separately."""

    is_driving: Callable[[], bool | None] = _return_unknown
    command: str = ""

    def format_next_command(self, how: TerminationKind, step: int) -> str:
        if how == "finished":
            return f"`{self.command} --steps {compute_next_step_goal(step)}` trains it further" if self.command else ""
        return f"`{self.command}` resumes it" if self.command else "start its workers again: it resumes from its checkpoint"


def compute_next_step_goal(step: int) -> int:
    """Up to which step a run that finished at ``step`` may be trained next."""
    return step + max(step, MORE_STEPS)


class Termination(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, ``seconds`` ago. ``line`` is the text for the user, with the command that resumes it."""

    how: TerminationKind
    since_ns: int
    seconds: float
    line: str


class TerminationState:
    """A fold of the log's training and life entries: the last message of the newest learner; 0 and None if there is none."""

    def __init__(self) -> None:
        self.finished_ns = 0
        self.last_entry: WorkerStopped | WorkerFailed | None = None
        self.last_entry_ns = 0

    @property
    def is_known(self) -> bool:
        """True if the newest learner has said how it ended."""
        return bool(self.finished_ns or self.last_entry)

    def apply(self, message: Message, time_ns: int) -> None:
        match message:
            case TrainingFinished():
                self.finished_ns = time_ns
            case LineageStarted():
                self.finished_ns = 0
                self.last_entry = None
            case WorkerStarted(role="learner"):
                self.last_entry = None
            case WorkerStopped(role="learner") | WorkerFailed(role="learner"):
                self.last_entry, self.last_entry_ns = message, time_ns


def detect_termination(
    state: TerminationState, driver: Driver, *, is_silent: bool, is_anybody_alive: bool, last_time_ns: int, step: int, steps:
    int,
    now_ns: int,
) -> Termination | None:  # fmt: skip
    """Detect the end of a run; None while it continues or may continue by itself.

    ``is_silent`` is a server that does not answer; ``last_time_ns`` the time of the newest entry that was read. A learner that
    stored its last entry may be started again by an `up` that drives the run; one without may only be out of reach.
    """
    how, since_ns, cause = _classify(state, driver, is_silent=is_silent, is_anybody_alive=is_anybody_alive)
    if how is None:
        return None
    since_ns = since_ns or last_time_ns
    seconds = max(now_ns - since_ns, 0) / 1e9 if since_ns else 0.0
    goal = f" of {steps}" if how != "finished" and steps > step else ""
    at = f"at step {step}{goal}" if step else "before its first step"
    parts = [f"over: {_DESCRIPTIONS[how]}{_format_time(since_ns, seconds)} {at}{cause}", driver.format_next_command(how, step)]
    return Termination(how=how, since_ns=since_ns, seconds=seconds, line=" ".join("; ".join(filter(None, parts)).split()))


_DESCRIPTIONS: dict[TerminationKind, str] = {
    "finished": "its training finished",
    "stopped": "it was stopped normally",
    "failed": "its learner failed",
    "gone": "it ended",
}


def _classify(
    state: TerminationState, driver: Driver, *, is_silent: bool, is_anybody_alive: bool
) -> tuple[TerminationKind | None, int, str]:
    """The kind of its end, its time (0: with its last entry) and its cause."""
    if state.finished_ns:
        return "finished", state.finished_ns, ""
    if is_anybody_alive:
        return None, 0, ""
    is_driving = driver.is_driving()
    if state.last_entry is not None and (is_silent or not is_driving):
        if isinstance(state.last_entry, WorkerFailed):
            return "failed", state.last_entry_ns, f" ({state.last_entry.error_class}: {state.last_entry.error})"
        return "stopped", state.last_entry_ns, ""
    return ("gone" if is_driving is False else None), 0, " without a stop message, as if it was killed"


def _format_time(since_ns: int, seconds: float) -> str:
    if not since_ns:
        return ""
    since = datetime.datetime.fromtimestamp(since_ns // 10**9, datetime.UTC)
    return f" {format_duration(seconds)} ago ({since:%Y-%m-%d %H:%M} UTC)"
