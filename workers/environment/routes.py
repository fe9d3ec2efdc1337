"""Which inference lanes may be used: an environment worker hears of draining inference workers through their heartbeats."""

from __future__ import annotations

from collections.abc import Callable

from fleetbus.bus.base import Bus
from fleetbus.errors import NoResponders, RequestUnanswered
from schemas import ControlAnswered, ControlRequested, Heartbeat, MalformedMessage, Subjects, decode, encode

ANSWER_SECONDS = 0.5
"""How long an inference worker has to answer whether it holds an observation."""


class Routes:
    """``on_draining`` is called with a lane when its worker begins to drain."""

    def __init__(self, bus: Bus, subjects: Subjects, on_draining: Callable[[str], None]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._on_draining = on_draining
        self._draining: set[str] = set()

    def usable(self, lane: str) -> bool:
        return lane not in self._draining

    async def run(self) -> None:
        """Follow the heartbeats of inference workers, for ever."""
        async with self._bus.listen(self._subjects.heartbeat("inference", "*")) as heartbeats:
            while True:
                subject, payload = await heartbeats.receive()
                try:
                    self._heard(decode(Heartbeat, payload, subject=subject))
                except MalformedMessage:
                    continue

    def _heard(self, heartbeat: Heartbeat) -> None:
        if not heartbeat.draining:
            self._draining.discard(heartbeat.lane)
        elif heartbeat.lane not in self._draining:
            self._draining.add(heartbeat.lane)
            self._on_draining(heartbeat.lane)

    async def holds(self, worker: str, turn: str) -> bool | None:
        """Ask an inference worker whether it works on a turn (``episode.attempt.turn``); None if it does not answer."""
        question = encode(ControlRequested(command="ping"))
        subject = self._subjects.control("inference", worker)
        try:
            answer = await self._bus.request(subject, question, timeout=ANSWER_SECONDS)
            return turn in decode(ControlAnswered, answer, subject=subject).busy_with
        except (NoResponders, RequestUnanswered, MalformedMessage):
            return None
