"""Stores Actions, one per turn and in the order of the turns (docs/concepts/delivery.md, rules 4 and 5).

An Action expects the sequence that its Observation carries, or that of the turn before it (`TurnOrder`): the server stores that
of the first to answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Container

import anyio
import msgspec
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.log.episodes import RETRY_SECONDS, decode_entries
from fleetbus_schemas import Action, Observation
from fleetbus_workers.inference.turn_order import LONGEST_WAIT_IN_SLOT_SECONDS, LONGEST_WAIT_SECONDS, OutOfTurn, TurnOrder
from fleetbus_workers.inference.waiting_turns import WaitingTurns

log = structlog.get_logger()


class ActionStore:
    """Of one worker. ``busy`` are turns in work, as in `TurnOrder`; ``forget`` is told of an Action that another worker's took
    the place of. `run` runs beside it."""

    def __init__(
        self, bus: LogBus, busy: Container[str], counters: defaultdict[str, float], forget: Callable[[Action], None]
    ) -> None:
        self._bus = bus
        self._counters = counters
        self._forget = forget
        self._order = TurnOrder(bus, busy)
        self._waiting_turns = WaitingTurns()

    async def run(self) -> None:
        """Run the turns that wait for others beside the slots, until cancelled."""
        await self._waiting_turns.run()

    async def wait_until_idle(self) -> None:
        """Return when no turn waits outside the slots."""
        await self._waiting_turns.wait_until_idle()

    async def start(self, turn: str, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run the work of a turn that was asked ahead; returns when it has ended or has left its slot."""
        await self._waiting_turns.start(turn, work, *arguments)

    def end(self, turn: str) -> None:
        """A turn is no longer in work."""
        self._order.end(turn)

    async def store(self, observation: Observation, action: Action, subject: str, payload: bytes) -> bool:
        """Store an encoded Action, or find that it stands there already; False if the observation is outdated."""
        while True:
            try:
                expected = await self._wait_for_turn(observation, subject) if observation.ahead else observation.action_sequence
                await self._bus.publish(subject, payload, expected_last=expected)
                return True
            except OutOfTurn:
                self._counters["out_of_turn"] += 1
                return await self._confirm_stored(subject, action)
            except SequenceConflict:
                self._counters["refused"] += 1
                if await self._confirm_stored(subject, action):
                    return True
                if not observation.ahead:
                    return False
            except (LogFull, PublishUnanswered) as error:  # left to its lease, it would count as an observation that kills
                log.warning("action publish failed; retrying", reason=str(error))
                await anyio.sleep(RETRY_SECONDS)

    async def _wait_for_turn(self, observation: Observation, subject: str) -> int:
        """See `TurnOrder.wait`. It takes no slot, as long as others do not wait by the hundred."""
        has_slot = not self._waiting_turns.leave_slot(f"{observation.episode_id}.{observation.attempt}.{observation.turn}")
        longest_seconds = LONGEST_WAIT_IN_SLOT_SECONDS if has_slot else LONGEST_WAIT_SECONDS
        return await self._order.wait(observation, subject, longest_seconds=longest_seconds)

    async def _confirm_stored(self, subject: str, action: Action) -> bool:
        """True if the stored Action is this worker's own, from a publish whose acknowledgement was lost; else its history is
        forgotten, which another worker's Action continues."""
        stored = await self._read_last(subject)
        for _, stored_action in decode_entries(Action, [stored] if stored is not None else []):
            if msgspec.structs.asdict(stored_action) == msgspec.structs.asdict(action):
                return True
        self._forget(action)
        return False

    async def _read_last(self, subject: str) -> StreamEntry | None:
        """The last entry, however long the log cannot be read: left to its lease, the observation would count as above."""
        while True:
            try:
                return await self._bus.last(subject)
            except RequestUnanswered as unanswered:
                log.warning("log read failed; retrying", subject=subject, reason=str(unanswered))
                await anyio.sleep(RETRY_SECONDS)
