"""The inference lanes that may be used: an environment worker reads from their heartbeats which inference workers drain and
which are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetbus.bus.base import CallBus
from fleetbus.delivery.heartbeats import decode_heartbeat
from fleetbus.errors import NoResponders, RequestUnanswered
from fleetbus_schemas import ControlAnswered, ControlRequested, Heartbeat, MalformedMessage, Subjects, decode, encode

ANSWER_SECONDS = 0.5
"""Time limit of asking an inference worker what it works on."""


class LaneStatus:
    """``on_draining`` is called with a lane when its worker begins to drain."""

    def __init__(self, bus: CallBus, subjects: Subjects, on_draining: Callable[[str], None]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._on_draining = on_draining
        self._draining: set[str] = set()
        self._full: set[str] = set()
        self._with_capacity: set[str] = set()

    def is_usable(self, lane: str) -> bool:
        return lane not in self._draining

    def is_full(self, lane: str) -> bool:
        """True if the lane's worker had no free slot at its last heartbeat, and another one had: an observation would wait
        there, so it goes to any lane. Workers with free slots pull from it, so the least loaded get it."""
        return lane in self._full and bool(self._with_capacity - {lane})

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
        self._update_capacity(heartbeat)
        if not heartbeat.draining:
            self._draining.discard(heartbeat.lane)
        elif heartbeat.lane not in self._draining:
            self._draining.add(heartbeat.lane)
            self._on_draining(heartbeat.lane)

    def _update_capacity(self, heartbeat: Heartbeat) -> None:
        has_room = heartbeat.in_flight < heartbeat.slots and not heartbeat.draining
        for lanes, is_member in ((self._with_capacity, has_room), (self._full, heartbeat.in_flight >= heartbeat.slots)):
            (lanes.add if is_member else lanes.discard)(heartbeat.lane)

    async def ask_turns(self, worker: str) -> Sequence[str] | None:
        """Ask an inference worker which turns it works on (``episode.attempt.turn``); None if it does not answer."""
        question = encode(ControlRequested(command="ping"))
        subject = self._subjects.control("inference", worker, "ping")
        try:
            answer = await self._bus.request(subject, question, timeout=ANSWER_SECONDS)
            return decode(ControlAnswered, answer, subject=subject).busy_with
        except (NoResponders, RequestUnanswered, MalformedMessage):
            return None
