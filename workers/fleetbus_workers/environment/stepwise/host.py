"""The step-wise sessions of one environment worker: calls come by request/reply, slots limit how many are open.

Above it is the worker; below one `HostedSession` per slot. A session that is not here is looked up in its journal first: what
was done is answered from there, what a dead worker left is taken over by a claim, and whoever lost its claim stops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from fleetbus.bus.base import Request
from fleetbus.core.journal import refused
from fleetbus.errors import BusClosed, BusError
from fleetbus_schemas import MalformedMessage, SessionAnswer, SessionCall, SessionClaimed, decode, encode
from fleetbus_schemas.session import SessionEnd
from fleetbus_workers.environment.attempts import Crew
from fleetbus_workers.environment.stages import Superseded
from fleetbus_workers.environment.stepwise.hosted import STORE_SECONDS, HostedSession, NoRoom
from fleetbus_workers.environment.stepwise.journal import append, journal_of
from fleetbus_workers.environment.stepwise.orphans import OrphanSweep

REAP_SECONDS = 1.0
CALLS_PER_SLOT = 4
"""Calls in work per slot; further ones are told to come again."""

log = structlog.get_logger()


class SessionHost:
    """Serves ``fbrpc.<run>.<worker>.*``: ``slots`` sessions at most, further ones queue for as long as their caller waits."""

    def __init__(self, crew: Crew, slots: int, counters: defaultdict[str, float]) -> None:
        self._crew = crew
        self._slots = slots
        self._free = anyio.Semaphore(slots) if slots else None
        self._counters = counters
        self._hosted: dict[str, HostedSession] = {}
        self._taking_up: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._calls = 0
        self._draining = False
        self._emptied = anyio.Event()
        self._admitted = anyio.Event()

    @property
    def open(self) -> int:
        """Sessions that hold a slot."""
        return len(self._hosted)

    @property
    def names(self) -> tuple[str, ...]:
        """The sessions that are held here."""
        return tuple(self._hosted)

    async def run(self) -> None:
        """Serve until cancelled; then every environment is closed, and sessions may go on elsewhere."""
        crew = self._crew
        sweep = OrphanSweep(crew.bus, crew.subjects, worker=crew.worker, limits=crew.limits)
        async with crew.bus.serve(crew.subjects.rpc(crew.worker, "*")) as server:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._reap, group)
                    group.start_soon(sweep.run)
                    while True:
                        request = await server.receive()
                        if self._calls >= CALLS_PER_SLOT * self._slots + 1:
                            group.start_soon(self._turn_away, request)
                        else:
                            self._calls += 1
                            group.start_soon(self._handle, request)
            finally:
                with anyio.CancelScope(shield=True):  # each close is bounded by its own limit
                    await self._leave_all()

    async def drain(self, seconds: float) -> None:
        """Admit nobody new; after ``seconds`` hand back what others can go on with, and end the rest as ``lost``."""
        self._draining = True
        with anyio.move_on_after(seconds):
            while self._hosted:
                self._emptied = anyio.Event()
                await self._emptied.wait()
        async with anyio.create_task_group() as group:
            for session, hosted in list(self._hosted.items()):
                group.start_soon(self._hand_back, session, hosted)

    async def _hand_back(self, session: str, hosted: HostedSession) -> None:
        try:
            if hosted.stays_whole:
                await hosted.leave()
            else:
                await hosted.end("lost", error_class="drained", error="its worker stopped")
        except (Superseded, NoRoom, BusError) as error:
            log.warning("session not handed back", session=session, reason=str(error))
        finally:
            self._forget(session)

    async def _leave_all(self) -> None:
        async with anyio.create_task_group() as group:
            for session, hosted in list(self._hosted.items()):
                group.start_soon(hosted.leave)
                self._forget(session)

    async def _turn_away(self, request: Request) -> None:
        call = self._decoded(request)
        if call is not None:
            await request.respond(encode(refused(call, "busy", "too many calls at a time")))

    def _decoded(self, request: Request) -> SessionCall | None:
        try:
            return decode(SessionCall, request.payload, subject=request.subject)
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.warning("call ignored", reason=str(malformed))
            return None

    async def _handle(self, request: Request) -> None:
        try:
            call = self._decoded(request)
            if call is None:
                return
            answer = await self._answer(call)
            self._counters["session_calls"] += 1
            await request.respond(self._encoded(call, answer))
        except BusClosed:
            raise
        except BusError as error:
            log.warning("call not answered", subject=request.subject, reason=str(error))
        finally:
            self._calls -= 1

    def _encoded(self, call: SessionCall, answer: SessionAnswer) -> bytes:
        try:
            return encode(answer)
        except MalformedMessage as malformed:
            return encode(refused(call, "conflict", f"the answer cannot travel: {malformed.reason}"))

    async def _answer(self, call: SessionCall) -> SessionAnswer:
        hosted = self._hosted.get(call.session)
        if hosted is None:
            async with self._alone(call.session):
                taken = self._hosted.get(call.session) or await self._take_up(call)
            if isinstance(taken, SessionAnswer):
                return taken
            hosted = taken
        answer = await hosted.answer(call)
        if hosted.over:
            self._forget(call.session, hosted)
        return answer

    @asynccontextmanager
    async def _alone(self, session: str) -> AsyncIterator[None]:
        """One call at a time takes a session up; those behind it find it here, however many before them gave up."""
        lock = self._taking_up[session]
        try:
            async with lock:
                yield
        finally:
            if not lock.statistics().locked and self._taking_up.get(session) is lock:
                del self._taking_up[session]

    async def _take_up(self, call: SessionCall) -> HostedSession | SessionAnswer:
        """Look, queue for a slot, look again, claim, restore."""
        crew = self._crew
        journal = await journal_of(crew.bus, crew.subjects, call.session)
        if answer := journal.answer(call):
            return answer
        if self._draining:
            return refused(call, "draining", f"{crew.worker} takes no more sessions")
        if not await self._slot(call.wait_seconds):
            return refused(call, "no_slot", f"all {self._slots} slots of {crew.worker} are taken")
        kept = False
        try:
            task = call.task if journal.claim is None else journal.claim.task
            if task is None:
                return refused(call, "conflict", "open needs a task")
            attempt = journal.claim.attempt + 1 if journal.claim else 1
            claim = SessionClaimed(session=call.session, attempt=attempt, worker=crew.worker, nonce=crew.nonce(), task=task)
            with anyio.fail_after(STORE_SECONDS):
                await append(crew.bus, crew.subjects, call.session, journal, claim)
            hosted = HostedSession(crew, journal, session=call.session)
            self._hosted[call.session] = hosted
            kept = True
            self._admitted.set()
            await self._restore(call.session, hosted)
            self._counters["sessions_opened" if attempt == 1 else "sessions_taken_over"] += 1
            return hosted
        except Superseded:
            return refused(call, "moved", "another worker took the session")
        except (NoRoom, TimeoutError):
            return refused(call, "log", "the log has no room for the claim")
        except MalformedMessage as malformed:
            return refused(call, "conflict", f"the task cannot be recorded: {malformed.reason}")
        finally:
            if not kept:
                self._release()

    async def _restore(self, session: str, hosted: HostedSession) -> None:
        """A session that cannot be restored and recorded holds no slot here; it has closed its environment by then."""
        try:
            await hosted.restore()
        except (Superseded, NoRoom):
            self._forget(session, hosted)
            raise

    async def _slot(self, wait_seconds: float) -> bool:
        """A slot within that time; those who wait are served in order of arrival."""
        if self._free is None:
            return False
        with anyio.move_on_after(max(wait_seconds, 0.0)):
            await self._free.acquire()
            return True
        try:
            self._free.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    def _release(self) -> None:
        assert self._free is not None
        self._free.release()

    def _forget(self, session: str, hosted: HostedSession | None = None) -> None:
        if session in self._hosted and (hosted is None or self._hosted[session] is hosted):
            del self._hosted[session]
            self._release()
            self._emptied.set()

    async def _reap(self, group: TaskGroup) -> None:
        """For ever: end the sessions whose time is up; one timer for all of them."""
        while True:
            if not self._hosted:
                self._admitted = anyio.Event()
                await self._admitted.wait()
            await anyio.sleep(REAP_SECONDS)
            now = anyio.current_time()
            for session, hosted in list(self._hosted.items()):
                if end := hosted.expired(now):
                    group.start_soon(self._expire, session, hosted, end)

    async def _expire(self, session: str, hosted: HostedSession, end: SessionEnd) -> None:
        try:
            await hosted.end(end)
        except (Superseded, NoRoom, BusError) as error:
            log.warning("session not ended", session=session, reason=str(error))
        self._forget(session, hosted)
