"""Waits for its turn: the Action of a turn that was asked for ahead of others is stored after that of the turn before it.

So the Actions of an attempt stand in the log in the order of their turns, whoever samples them first, and each is stored once
by compare-and-set (docs/concepts/delivery.md, rule 4).
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Literal

import anyio

from fleetbus.bus.base import LogBus
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, Observation

LONGEST_WAIT_SECONDS = 300.0
"""For a turn before that nobody samples here, of a log that can be read: another worker may take so long."""

LONGEST_WAIT_IN_SLOT_SECONDS = 60.0
"""The same while a slot is kept for it, which may be what the turn before needs."""

PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 0.4
"""Between looks for it, first and later."""

Place = Literal["early", "due", "past"]


class OutOfTurn(Exception):
    """An Action cannot be stored in its turn: the log is past it, or the turn before does not come."""


def find_place(observation: Observation, stored: Action | None) -> Place:
    """The place of a turn after the last Action on its subject: ``due`` if that is of the turn before, and was sampled."""
    before = (observation.attempt, observation.turn - 1)
    last = (stored.attempt, stored.turn) if stored is not None else (0, -1)
    if last < before:
        return "early"
    return "due" if last == before and stored is not None and stored.sampled else "past"


class TurnOrder:
    """The order of the turns of a worker; ``busy`` are those in work, as ``episode.attempt.turn``."""

    def __init__(self, bus: LogBus, busy: Container[str]) -> None:
        self._bus = bus
        self._busy = busy
        self._awaited: dict[str, anyio.Event] = {}
        self._now = get_clock()

    def end(self, turn: str) -> None:
        """A turn is no longer in work."""
        if (ended := self._awaited.pop(turn, None)) is not None:
            ended.set()

    async def wait(self, observation: Observation, subject: str, *, longest_seconds: float = LONGEST_WAIT_SECONDS) -> int:
        """The sequence that an Action of this turn, which was asked for ahead, expects on its subject. Raises `OutOfTurn`. The
        caller's scope ends it where the log cannot be read: nothing is known then."""
        before = f"{observation.episode_id}.{observation.attempt}.{observation.turn - 1}"
        give_up_at, pause = math.inf, PAUSE_SECONDS
        while True:
            ended = self._awaited.setdefault(before, anyio.Event()) if before in self._busy else None
            sequence, place = await self._look(observation, subject)
            if place == "due":
                return sequence
            if place == "past":
                raise OutOfTurn(f"the log is past turn {observation.turn} of attempt {observation.attempt}")
            if ended is not None:
                give_up_at, pause = math.inf, PAUSE_SECONDS
                await ended.wait()
                continue
            give_up_at = min(give_up_at, self._now() + longest_seconds) if place == "early" else math.inf
            if self._now() >= give_up_at:
                raise OutOfTurn(f"turn {observation.turn - 1} is not answered, and is not in work here")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _look(self, observation: Observation, subject: str) -> tuple[int, Place | None]:
        """The last sequence on the subject, and the place of the turn after it; None if the log could not be read."""
        try:
            stored = await self._bus.last(subject)
        except RequestUnanswered:
            return 0, None
        found = decode_entries(Action, [stored] if stored is not None else [])
        action = found[0][1] if found else None
        return stored.sequence if stored is not None else 0, find_place(observation, action)
