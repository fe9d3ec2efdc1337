"""The step-wise sessions of one environment worker: calls come by request/reply, slots limit how many are open.

Above it is the worker; below one `StepwiseSession` per slot. A session that is not here is looked up in its journal first: what
was done is answered from there, the session of a dead worker is taken over by a claim, and a worker that lost its claim stops.
"""

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup, TaskStatus

from fleetbus.bus.base import Request, RequestServer
from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.concurrency.notifier import Notifier
from fleetbus.concurrency.task_pool import TaskPool
from fleetbus.concurrency.wakeup import Wakeup
from fleetbus.core.episode.journal import Journal, build_refusal
from fleetbus.errors import BusClosed, BusError, RequestUnanswered
from fleetbus_schemas import MalformedMessage, SessionAnswer, SessionCall, SessionClaimed, decode, encode
from fleetbus_schemas.session import SessionEnd
from fleetbus_workers.environment.episode.stages import Superseded, find_step_limit
from fleetbus_workers.environment.stepwise.journal_log import LogUnavailable, append
from fleetbus_workers.environment.stepwise.journal_reads import JournalReads
from fleetbus_workers.environment.stepwise.orphan_sweep import OrphanSweep
from fleetbus_workers.environment.stepwise.session import StepwiseSession, release_held
from fleetbus_workers.environment.worker_context import WorkerContext

EXPIRY_CHECK_SECONDS = 1.0
MOST_WAIT_SECONDS = 600.0
"""Longest wait of a call for a slot, whatever it asks for."""
CALLS_PER_SLOT = 4
"""Concurrent calls per slot; further ones are refused as busy."""

JOURNAL_BYTES = 64 << 20
"""Of one session: beyond, it ends with its next call (docs/decisions/0265)."""
JOURNALS_BYTES = 512 << 20
"""Of all sessions here: beyond, so end those that have more than their share of it."""

TOO_MANY_CALLS = "too many calls at a time"

log = structlog.get_logger()


class _LocalCall:
    """A call from this process; ``answer`` None at the end: it was not answered here, or is not yet if it ``is_late``."""

    __slots__ = ("answer", "at", "done", "is_late")

    def __init__(self, at: float) -> None:
        self.at = at
        self.done = Wakeup()
        self.is_late = False
        self.answer: SessionAnswer | None = None

    def pass_by(self) -> None:
        self.at, self.is_late = math.inf, True
        self.done.set()


class SessionHost:
    """Serves ``fbrpc.<run>.<worker>.*``: ``slots`` sessions at most, further ones queue for as long as their caller waits."""

    def __init__(self, context: WorkerContext, slots: int, counters: defaultdict[str, float]) -> None:
        self._context = context
        self._slots = slots
        self._free = anyio.Semaphore(slots) if slots else None
        self._journals = JournalReads(context)
        self._counters = counters
        self._sessions: dict[str, StepwiseSession] = {}
        self._admission_locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._calls = 0
        self._draining = False
        self._tasks: TaskPool | None = None
        self._deadlines = Deadlines()
        self._local_calls: set[_LocalCall] = set()
        self.serving = False
        """Whether calls arrive here. A worker that says so earlier is asked, and taken for gone."""
        self._session_removed = Notifier()
        self._session_admitted = Notifier()

    @property
    def open(self) -> int:
        """Sessions that hold a slot."""
        return len(self._sessions)

    @property
    def names(self) -> tuple[str, ...]:
        """The sessions that are held here."""
        return tuple(self._sessions)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then every environment is closed, and sessions may continue elsewhere. Started: calls
        arrive."""
        context = self._context
        sweep = OrphanSweep(
            context.bus,
            context.subjects,
            worker=context.worker,
            limits=context.limits,
            release=partial(release_held, context),
            find_step_seconds=partial(_find_step_seconds, context),
        )
        async with context.bus.serve(context.subjects.rpc(context.worker, "*")) as server:
            self.serving = True
            task_status.started()
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._deadlines.run)
                    group.start_soon(self._end_expired, group)
                    group.start_soon(sweep.run)
                    await self._serve(server, group)
            finally:
                for local_call in self._local_calls:  # also those whose task never began
                    local_call.done.set()
                with anyio.CancelScope(shield=True):  # each close is bounded by its own limit
                    await self._leave_sessions()

    async def _serve(self, server: RequestServer, group: TaskGroup) -> None:
        """Until cancelled: from then on nothing is begun in a group that waits for its last tasks."""
        tasks = self._tasks = TaskPool(group)
        try:
            while True:
                request = await server.receive()
                if self._is_busy:
                    group.start_soon(self._reject, request)
                else:
                    self._calls += 1
                    tasks.start_soon(self._handle, request)
        finally:
            self.serving, self._tasks = False, None

    async def call(self, call: SessionCall, until: float = math.inf) -> SessionAnswer | None:
        """A call from this process, as one over the bus: it runs to its end even if its caller does not wait for it. None if
        nothing is served here, as where no worker responds; raises `RequestUnanswered` at ``until`` (of the loop's clock)."""
        if self._tasks is None:
            return None
        if self._is_busy:
            return build_refusal(call, "busy", TOO_MANY_CALLS)
        self._calls += 1
        local_call = _LocalCall(until)
        self._tasks.start_soon(self._handle_local, call, local_call)
        self._local_calls.add(local_call)
        self._deadlines.add(local_call)
        try:
            await local_call.done.wait()
        finally:
            self._deadlines.remove(local_call)
            self._local_calls.remove(local_call)
        if local_call.is_late and local_call.answer is None:
            raise RequestUnanswered(f"session {call.session}: no answer to {call.call} in time")
        return local_call.answer

    async def drain(self, seconds: float) -> None:
        """Admit no more sessions; after ``seconds`` release those that others can restore, end the rest as ``lost``."""
        self._draining = True
        with anyio.move_on_after(seconds):
            while self._sessions:
                await self._session_removed.wait()
        async with anyio.create_task_group() as group:
            for session, stepwise_session in list(self._sessions.items()):
                group.start_soon(self._release_or_end, session, stepwise_session)

    async def _release_or_end(self, session: str, stepwise_session: StepwiseSession) -> None:
        try:
            if stepwise_session.is_restorable:
                await stepwise_session.leave()
            else:
                await stepwise_session.end("lost", error_class="drained", error="its worker stopped")
        except (Superseded, LogUnavailable, BusError) as error:
            log.warning("session release failed; leaving it to its limits", session=session, reason=str(error))
        finally:
            self._remove(session)

    async def _leave_sessions(self) -> None:
        async with anyio.create_task_group() as group:
            for session, stepwise_session in list(self._sessions.items()):
                group.start_soon(stepwise_session.leave)
                self._remove(session)

    @property
    def _is_busy(self) -> bool:
        return self._calls >= CALLS_PER_SLOT * self._slots + 1

    async def _reject(self, request: Request) -> None:
        call = self._decode_call(request)
        if call is not None:
            await request.respond(encode(build_refusal(call, "busy", TOO_MANY_CALLS)))

    def _decode_call(self, request: Request) -> SessionCall | None:
        try:
            return decode(SessionCall, request.payload, subject=request.subject)
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.warning("call is malformed; ignoring it", reason=str(malformed))
            return None

    async def _handle(self, request: Request) -> None:
        try:
            call = self._decode_call(request)
            if call is None:
                return
            answer = await self._answer(call)
            self._counters["session_calls"] += 1
            await request.respond(self._encode_answer(call, answer))
        except BusClosed:
            raise
        except BusError as error:
            log.warning("call failed; sending no answer", subject=request.subject, reason=str(error))
        finally:
            self._calls -= 1
            _forget_call()

    async def _handle_local(self, call: SessionCall, local_call: _LocalCall) -> None:
        try:
            local_call.answer = await self._answer(call)
            self._counters["session_calls"] += 1
        except BusClosed:
            raise
        except BusError as error:
            log.warning("call failed; sending no answer", reason=str(error))
        finally:
            self._calls -= 1
            local_call.done.set()
            _forget_call()

    def _encode_answer(self, call: SessionCall, answer: SessionAnswer) -> bytes:
        try:
            return encode(answer)
        except MalformedMessage as malformed:
            return encode(build_refusal(call, "conflict", f"the answer cannot be encoded: {malformed.reason}"))

    async def _answer(self, call: SessionCall) -> SessionAnswer:
        structlog.contextvars.bind_contextvars(session=call.session, call_key=call.key)
        stepwise_session = self._sessions.get(call.session)
        if stepwise_session is None:
            async with self._lock_session(call.session):
                admitted = self._sessions.get(call.session) or await self._admit(call)
            if isinstance(admitted, SessionAnswer):
                return admitted
            stepwise_session = admitted
        answer = await stepwise_session.answer(call)
        if stepwise_session.is_over:
            self._remove(call.session, stepwise_session)
        return answer

    @asynccontextmanager
    async def _lock_session(self, session: str) -> AsyncIterator[None]:
        """One call at a time takes a session up; those behind it find it here, however many before them gave up."""
        lock = self._admission_locks[session]
        try:
            async with lock:
                yield
        finally:
            if not lock.statistics().locked and self._admission_locks.get(session) is lock:
                del self._admission_locks[session]

    async def _admit(self, call: SessionCall) -> StepwiseSession | SessionAnswer:
        """Look, queue for a slot, look again, claim, restore."""
        context = self._context
        journal = await self._journals.read(call)
        if answer := journal.answer(call):
            return answer
        if self._draining:
            return build_refusal(call, "draining", f"{context.worker} takes no more sessions")
        has_waited = not self._take_free_slot()
        if has_waited:
            journal = Journal()  # what was read may be long, and so may the wait
            if not await self._wait_for_slot(call.wait_seconds):
                return build_refusal(call, "no_slot", f"all {self._slots} slots of {context.worker} are taken")
        is_hosted = False
        try:
            if has_waited:
                journal = await self._journals.read(call)
                if answer := journal.answer(call):
                    return answer
            task = call.task if journal.claim is None else journal.claim.task
            if task is None:
                return build_refusal(call, "conflict", "open needs a task")
            attempt = journal.claim.attempt + 1 if journal.claim else 1
            claim = SessionClaimed(
                session=call.session, attempt=attempt, worker=context.worker, nonce=context.nonce(), task=task
            )
            has_records, journal = bool(journal.records), journal.without_records()  # as above: the log may be full
            await append(context.bus, context.subjects, call.session, journal, claim)
            if has_records:
                journal = await self._journals.read_claimed(call.session, journal.last_sequence)
            elif await self._journals.is_below_floor(call, journal.last_sequence):
                return build_refusal(call, "closed", "the session was opened before, and has left the log: name another")
            stepwise_session = StepwiseSession(
                context, journal, session=call.session, is_full=self._is_full, deadlines=self._deadlines
            )
            self._sessions[call.session] = stepwise_session
            is_hosted = True
            self._session_admitted.notify()
            await self._restore(call.session, stepwise_session)
            self._counters["sessions_opened" if attempt == 1 else "sessions_taken_over"] += 1
            return stepwise_session
        except Superseded:
            return build_refusal(call, "moved", "another worker took the session")
        except LogUnavailable as unavailable:
            return build_refusal(call, "log", f"the session was not opened: {unavailable}")
        except MalformedMessage as malformed:
            return build_refusal(call, "conflict", f"the task cannot be recorded: {malformed.reason}")
        finally:
            if not is_hosted:
                self._release_slot()

    async def _restore(self, session: str, stepwise_session: StepwiseSession) -> None:
        """A session that cannot be restored and recorded frees its slot; its environment is closed already."""
        try:
            await stepwise_session.restore()
        except (Superseded, LogUnavailable):
            self._remove(session, stepwise_session)
            raise

    def _is_full(self, journal: Journal) -> bool:
        """True if the journal of a session here has reached its limit; below its share none has, whatever others do."""
        if journal.size_bytes <= min(JOURNALS_BYTES // self._slots, JOURNAL_BYTES):
            return False
        return (
            journal.size_bytes > JOURNAL_BYTES or sum(each.journal_bytes for each in self._sessions.values()) > JOURNALS_BYTES
        )

    def _take_free_slot(self) -> bool:
        if self._free is None:
            return False
        try:
            self._free.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    async def _wait_for_slot(self, wait_seconds: float) -> bool:
        """A slot within that time; those who wait are served in order of arrival. What is no time is none."""
        if self._free is None or not wait_seconds > 0.0:
            return False
        with anyio.move_on_after(min(wait_seconds, MOST_WAIT_SECONDS)):
            await self._free.acquire()
            return True
        return False

    def _release_slot(self) -> None:
        assert self._free is not None
        self._free.release()

    def _remove(self, session: str, stepwise_session: StepwiseSession | None = None) -> None:
        if session in self._sessions and (stepwise_session is None or self._sessions[session] is stepwise_session):
            del self._sessions[session]
            self._release_slot()
            self._session_removed.notify()

    async def _end_expired(self, group: TaskGroup) -> None:
        """End expired sessions until cancelled; one timer for all of them."""
        while True:
            if not self._sessions:
                await self._session_admitted.wait()
            await anyio.sleep(EXPIRY_CHECK_SECONDS)
            now = anyio.current_time()
            for session, stepwise_session in list(self._sessions.items()):
                if stepwise_session.is_over:
                    self._remove(session, stepwise_session)
                elif end := stepwise_session.check_expiry(now):
                    group.start_soon(self._expire, session, stepwise_session, end)

    async def _expire(self, session: str, stepwise_session: StepwiseSession, end: SessionEnd) -> None:
        try:
            await stepwise_session.end(end)
        except (Superseded, LogUnavailable, BusError) as error:
            log.warning("session end failed; removing it from this worker", session=session, reason=str(error))
        self._remove(session, stepwise_session)


def _forget_call() -> None:
    """The task is used again, for a call of another session."""
    structlog.contextvars.unbind_contextvars("session", "call_key")


def _find_step_seconds(context: WorkerContext, journal: Journal) -> float:
    """The longest that a step of a session may take; as long as any may where its environment cannot be made here."""
    if journal.claim is None:
        return context.limits.step
    try:
        return find_step_limit(context.make(journal.claim.task), context.limits)[0]
    except Exception as error:  # noqa: BLE001 - a class of a user's may fail in any way
        log.warning("environment of a session cannot be made", session=journal.claim.session, reason=str(error))
        return max(context.limits.step, context.limits.episode)
