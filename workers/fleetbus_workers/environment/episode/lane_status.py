"""The inference lanes that may be used: an environment worker reads from their heartbeats which inference workers drain and
which are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio

from fleetbus.bus.base import CallBus
from fleetbus.delivery.heartbeats import LOST_AFTER_SECONDS, decode_heartbeat
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import ANY_LANE, ControlAnswered, ControlRequested, Heartbeat, MalformedMessage, Subjects, decode, encode
from fleetbus_schemas.names import is_name

ANSWER_SECONDS = 0.5
"""Time limit of asking an inference worker what it works on."""

MOST_WORKERS = 4096
"""Inference workers that are remembered, those heard of last. A lane is better avoided for long after its worker has drained or
died full, so silence alone is no reason to forget one."""


class _LaneState(NamedTuple):
    """A lane by the newest heartbeat of its worker, which came ``at`` this time."""

    lane: str
    at: float
    is_draining: bool
    is_full: bool
    takes_ahead: bool
    policy: str


class LaneStatus:
    """``on_draining`` is called with a lane when its worker begins to drain. A worker has one lane, and a lane one worker: the
    one that named it last."""

    def __init__(self, bus: CallBus, subjects: Subjects, on_draining: Callable[[str], None]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._on_draining = on_draining
        self._states: dict[str, _LaneState] = {}
        """By worker, in the order in which they were heard of."""
        self._workers: dict[str, str] = {}
        """By lane."""

    def is_usable(self, lane: str) -> bool:
        state = self._find_state(lane)
        return state is None or not state.is_draining

    def is_full(self, lane: str) -> bool:
        """True if the lane's worker had no free slot at its last heartbeat, and another one had: an observation would wait
        there, so it goes to any lane. Workers with free slots pull from it, so the least loaded get it."""
        state = self._find_state(lane)
        return state is not None and state.is_full and self._has_room_beside(lane)

    def takes_ahead(self, lane: str, policy: str) -> bool:
        """True if whoever takes an observation of this policy from the lane answers turns that are asked for ahead of others;
        of any lane, if all of whom was heard lately do."""
        if lane != ANY_LANE:
            state = self._find_state(lane)
            return state is not None and state.takes_ahead
        oldest = anyio.current_time() - LOST_AFTER_SECONDS
        told = [state.takes_ahead for state in self._states.values() if state.at >= oldest and state.policy in ("", policy)]
        return bool(told) and all(told)

    async def run(self) -> None:
        """Follow the heartbeats of inference workers until cancelled."""
        async with self._bus.listen(self._subjects.heartbeat("inference", "*")) as heartbeats:
            while True:
                subject, payload = await heartbeats.receive()
                try:
                    self._apply_heartbeat(decode_heartbeat(subject, payload))
                except MalformedMessage:
                    continue

    def _apply_heartbeat(self, heartbeat: Heartbeat) -> None:
        lane, worker = heartbeat.lane, heartbeat.worker
        if not is_name(lane) or lane == ANY_LANE:  # it is nobody's, and whoever waits there waits for all
            return
        was_usable = self.is_usable(lane)
        self._forget(worker)
        self._forget(self._workers.get(lane, ""))
        is_full = heartbeat.in_flight >= heartbeat.slots
        self._states[worker] = _LaneState(
            lane, anyio.current_time(), heartbeat.draining, is_full, heartbeat.takes_ahead, heartbeat.policy
        )
        self._workers[lane] = worker
        if len(self._states) > MOST_WORKERS:
            self._forget(next(iter(self._states)))
        if heartbeat.draining and was_usable:
            self._on_draining(lane)

    def _forget(self, worker: str) -> None:
        if (state := self._states.pop(worker, None)) is not None:
            del self._workers[state.lane]

    def _find_state(self, lane: str) -> _LaneState | None:
        return self._states.get(self._workers.get(lane, ""))

    def _has_room_beside(self, lane: str) -> bool:
        """True if a worker of another lane had a free slot lately; those heard of last come first."""
        oldest = anyio.current_time() - LOST_AFTER_SECONDS
        for state in reversed(self._states.values()):
            if state.at < oldest:
                return False
            if not (state.is_full or state.is_draining or state.lane == lane):
                return True
        return False

    async def ask_turns(self, worker: str) -> Sequence[str] | None:
        """Ask an inference worker which turns it works on (``episode.attempt.turn``); None if it does not answer."""
        question = encode(ControlRequested(command="ping"))
        subject = self._subjects.control("inference", worker, "ping")
        try:
            answer = await self._bus.request(subject, question, timeout=ANSWER_SECONDS)
            return decode(ControlAnswered, answer, subject=subject).busy_with
        except (NoResponders, RequestUnanswered, MalformedMessage):
            return None
