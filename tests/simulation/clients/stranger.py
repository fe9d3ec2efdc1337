"""A client of step-wise sessions that does everything wrong: what it asks of others' sessions is refused, and changes nothing.

It knows the names of workers and of sessions, as everybody with a caller's account does.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio

from fleetbus.bus.base import Bus
from fleetbus.errors import BusClosed, BusError
from fleetbus_schemas import SessionAnswer, SessionCall, Subjects, Task, decode, encode
from fleetbus_schemas.session import SessionCallKind
from fleetbus_workers.environment.stepwise.host import CALLS_PER_SLOT
from tests.simulation.judge.session_checker import SessionChecker
from tests.simulation.observer import GARBAGE, Observer
from tests.simulation.platform.process import RUN, Process

ROUNDS = 12
LONGEST_PAUSE_SECONDS = 10.0
CALL_SECONDS = 15.0
FAR = 1_000_000
IMPATIENT_CALLS = 20
"""More than one session lets wait."""

OWN_CALLS: tuple[SessionCallKind, ...] = ("open", "step", "reset", "open", "step", "step", "step", "verify", "close", "step")
"""Of a session of its own: steps before its reset and after its end, and a second opening."""


class Stranger:
    """``list_workers`` names the environment workers of the moment."""

    def __init__(
        self,
        process: Process,
        checker: SessionChecker,
        observer: Observer,
        draw: random.Random,
        list_workers: Callable[[], list[str]],
    ) -> None:
        self._process = process
        self._checker = checker
        self._observer = observer
        self._draw = draw
        self._list_workers = list_workers
        self._count = 0
        self.floods = False

    async def run(self, bus: Bus) -> None:
        for number in range(ROUNDS):
            await anyio.sleep(self._draw.random() * LONGEST_PAUSE_SECONDS)
            workers = self._list_workers()
            if self._process.drain.is_set():
                return
            if workers:
                await self._disturb(bus, self._draw.choice(workers), number)

    async def _disturb(self, bus: Bus, worker: str, number: int) -> None:
        match self._draw.randrange(4):
            case 0:
                await self._send(bus, worker, "nobody", GARBAGE)
            case 1:
                await self._call_at_once(bus, worker)
            case 2:
                await self._play(bus, worker, f"{self._process.name}-s{number}")
            case _:
                await self._meddle(bus, worker)

    async def _meddle(self, bus: Bus, worker: str) -> None:
        """Calls of a session that somebody else plays."""
        played = [name for name, pages in self._checker.pages.items() if pages.records and not pages.end]
        session = self._draw.choice(sorted(played)) if played else "nobody"
        records = self._checker.pages[session].records if played else []
        calls = [
            SessionCall(session=session, call="step", key=self._next_key(), number=FAR, text="x"),
            SessionCall(session="nobody", call="step", key=self._next_key(), text="x"),
            SessionCall(session="nobody", call="open", key=self._next_key()),
            *(SessionCall(session=session, call="step", key=each.call.key, text="another") for each in records[:1]),
        ]
        for call in calls:
            answer = await self._send(bus, worker, call.session, encode(call))
            executed = answer is not None and not answer.refusal and answer.end is None
            self._observer.require(not executed, "a wrong call is refused", f"{call.session} {call.call}: {answer}")

    async def _call_at_once(self, bus: Bus, worker: str) -> None:
        """More calls than a worker takes at a time."""
        async with anyio.create_task_group() as group:
            for _ in range(CALLS_PER_SLOT * self._process.session_slots + 3):
                call = SessionCall(session="nobody", call="state", key=self._next_key())
                group.start_soon(self._send, bus, worker, call.session, encode(call))

    async def _play(self, bus: Bus, worker: str, session: str) -> None:
        """A session of its own, out of order."""
        task = Task(key=session, config={"turns": 2})
        for kind in OWN_CALLS:
            call = SessionCall(
                session=session, call=kind, key=self._next_key(), task=task if kind == "open" else None, text="x"
            )
            answer = await self._send(bus, worker, session, encode(call))
            if answer is None:
                return
            if kind != "close":
                self._checker.on_answer(answer)
            if kind == "reset" and self.floods:
                await self._call_without_waiting(bus, worker, session)

    async def _call_without_waiting(self, bus: Bus, worker: str, session: str) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(IMPATIENT_CALLS):
                call = SessionCall(session=session, call="step", key=self._next_key(), text="x")
                group.start_soon(self._send, bus, worker, session, encode(call))

    async def _send(self, bus: Bus, worker: str, session: str, payload: bytes) -> SessionAnswer | None:
        """None if nobody answers."""
        subject = Subjects(RUN).rpc(worker, session)
        try:
            answer = decode(SessionAnswer, await bus.request(subject, payload, timeout=CALL_SECONDS), subject=subject)
        except BusClosed:
            raise
        except BusError:
            return None
        self._observer.trace("stranger", session, answer.refusal or answer.end or "executed")
        return answer

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._process.name}-{self._count}"
