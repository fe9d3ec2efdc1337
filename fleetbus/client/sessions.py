"""Step-wise sessions from the client's side: open an environment on the bus, step it, survive its worker.

    async with sessions(bus, subjects) as client:
        async with client.open(task) as session:
            start = await session.reset()
            answer = await session.step("left")
            verdict = await session.verify()

Every call has a key; a repeat of it gets the stored answer. When the worker is gone, another one takes the session over.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.client.session_hosts import SessionHosts
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import BusClosed, FleetbusError, NoResponders, RequestUnanswered
from fleetbus.log.episodes import read_entry
from fleetbus_schemas import (
    ControlAnswered,
    ControlRequested,
    MalformedMessage,
    SessionAnswer,
    SessionCall,
    SessionClaimed,
    SessionRecorded,
    Subjects,
    Task,
    decode,
    encode,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.subjects import check_name

ANSWER_TIMEOUT_SECONDS = 5.0
"""After this long without an answer the worker is asked whether it lives; a call that still runs there is joined."""

PING_SECONDS = 1.0
QUEUE_SECONDS = 2.0
"""How long a call queues for a slot at one worker before another one is tried."""

CLOSE_SECONDS = 35.0
RETRY_SECONDS = 0.25

RETRIED_REFUSALS = frozenset({"no_slot", "draining", "moved", "busy", "log"})
"""Refusals after which a call is made again, the first three of them at another worker."""

log = structlog.get_logger()


AskLocally = Callable[[SessionCall, float], Awaitable[SessionAnswer | None]]
"""A host of sessions in this process: the answer to a call, or None if it serves none; raises `RequestUnanswered` at the given
time of the loop's clock."""


class SessionFailed(FleetbusError):
    """A call was not executed, or it ended the session. ``answer`` says why: its refusal, or its end and error class."""

    def __init__(self, answer: SessionAnswer) -> None:
        super().__init__(f"session {answer.session}: {answer.refusal or answer.end}: {answer.error or answer.error_class}")
        self.answer = answer


class SessionUnavailable(FleetbusError):
    """No worker answered in time. The call may have been executed: repeat it under the same key to find out."""


class SessionClient:
    """Calls to the sessions of one run. Sessions are named by their callers, so a call can come from any client."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self._hosts = SessionHosts(bus, subjects)
        self._workers: dict[str, str] = {}
        self._local: dict[str, AskLocally] = {}
        self._now = get_clock()

    def add_local_host(self, worker: str, ask: AskLocally) -> None:
        """A worker in this process is asked directly, and chosen before all others."""
        self._local[worker] = ask

    async def run(self) -> None:
        """Follow the heartbeats of workers until cancelled."""
        await self._hosts.run()

    async def call(self, call: SessionCall, *, timeout: float) -> SessionAnswer:
        """The answer to one call, wherever the session is; raises `SessionUnavailable` after ``timeout`` seconds.

        Refusals that name a mistake of the caller's are returned as they are.
        """
        refusal, is_unanswered = "no worker answers", False
        until = self._now() + timeout
        worker = self._workers.get(call.session, "")
        if worker in self._local and call.call != "open":  # the host ends the wait itself, which costs no scope
            answer = await self._ask(worker, call, until=until)
            if answer is not None and answer.refusal not in RETRIED_REFUSALS:
                self._remember_worker(answer, worker)
                return answer
        with anyio.move_on_after(until - self._now()):
            avoid: set[str] = set()
            while True:
                worker = self._workers.get(call.session) or await self._locate_worker(call.session, avoid)
                worker = worker or await self._choose_worker(avoid)
                if call.call == "open" and not is_unanswered:  # no worker has it yet, so it is made anew
                    call = msgspec.structs.replace(call, earliest_sequence=await self._find_next_sequence())
                answer = await self._ask(worker, call, until=until)
                if answer is None:
                    is_unanswered = True
                    self._forget_worker(call.session, worker)
                    avoid.add(worker)
                    continue
                self._remember_worker(answer, worker)
                if answer.refusal not in RETRIED_REFUSALS:
                    return answer
                refusal = answer.error
                if answer.refusal in ("no_slot", "draining", "moved"):
                    self._workers.pop(call.session, None)
                    avoid.add(worker)
                else:
                    await anyio.sleep(RETRY_SECONDS)
        raise SessionUnavailable(f"session {call.session}: no answer to {call.call} within {timeout:g} s: {refusal}")

    async def _find_next_sequence(self) -> int:
        """The first log position at which what is made now can stand."""
        while True:
            try:
                return (await self.bus.log_state()).last_sequence + 1
            except RequestUnanswered as unanswered:
                log.warning("log read failed; retrying", reason=str(unanswered))
                await anyio.sleep(RETRY_SECONDS)

    def session(self, name: str = "", *, timeout: float = 300.0) -> Session:
        """A session that is not open yet; no request is sent. Its name is generated unless given."""
        return Session(self, name or secrets.token_hex(16), timeout=timeout)

    @asynccontextmanager
    async def open(self, task: Task, *, session: str = "", timeout: float = 300.0) -> AsyncIterator[Session]:
        """A session from its first call to its last, closed in every case."""
        opened = self.session(session, timeout=timeout)
        try:
            await opened.request("open", task=task)
            yield opened
        finally:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                await opened.close()

    async def _locate_worker(self, session: str, avoid: Collection[str]) -> str:
        """The worker that holds the session, as its journal and the worker itself say; empty if no worker does.

        Another worker would take it over, as it has to where the holder is gone: what cannot be done again would be lost.
        """
        subject = self.subjects.session(session)
        while True:
            try:
                newest = await self.bus.last(subject)
                break
            except RequestUnanswered as unanswered:
                log.warning("log read failed; retrying", run=self.subjects.run, session=session, reason=str(unanswered))
                await anyio.sleep(RETRY_SECONDS)
        holder = _find_holder(newest) if newest is not None else ""
        if not holder or holder in avoid:
            return ""
        answer = await self._ping(holder)
        return holder if answer is not None and session in answer.busy_with else ""

    async def _choose_worker(self, avoid: set[str]) -> str:
        """The best host, one in this process first; after all were tried, they are tried again from the first."""
        for worker in self._local:
            if worker not in avoid:
                return worker
        with anyio.move_on_after(RETRY_SECONDS if avoid else ANSWER_TIMEOUT_SECONDS):
            return await self._hosts.choose(avoid)
        avoid.clear()
        return await self._hosts.choose()

    async def _ask(self, worker: str, call: SessionCall, *, until: float) -> SessionAnswer | None:
        """The answer of one worker, however long the call takes; None when it is gone, or answers what is none."""
        waiting = min(QUEUE_SECONDS, max(until - self._now(), 0.0))
        payload = encode(msgspec.structs.replace(call, wait_seconds=waiting))
        subject = self.subjects.rpc(worker, call.session)
        if worker in self._local:  # what cannot be encoded is refused here too, and nothing is shared with the caller
            try:
                return await self._local[worker](decode(SessionCall, payload, subject=subject), until)
            except RequestUnanswered as unanswered:
                raise SessionUnavailable(str(unanswered)) from None
        while True:
            try:
                answered = await self.bus.request(subject, payload, timeout=ANSWER_TIMEOUT_SECONDS)
                answer = decode(SessionAnswer, answered, subject=subject)
                if (answer.session, answer.key) != (call.session, call.key):
                    raise MalformedMessage(subject, "it is the answer to another call")
                return answer
            except NoResponders:
                return None
            except MalformedMessage as malformed:
                log.warning("answer is malformed; choosing another worker", session=call.session, reason=malformed.reason)
                return None
            except RequestUnanswered:
                if await self._ping(worker) is None:
                    return None

    async def _ping(self, worker: str) -> ControlAnswered | None:
        """Ask a worker about itself; None if it does not answer."""
        control = self.subjects.control("environment", worker, "ping")
        try:
            answer = await self.bus.request(control, encode(ControlRequested(command="ping")), timeout=PING_SECONDS)
            return decode(ControlAnswered, answer, subject=control)
        except (NoResponders, RequestUnanswered, MalformedMessage):
            return None

    def _forget_worker(self, session: str, worker: str) -> None:
        log.info("session worker does not answer; choosing another", run=self.subjects.run, session=session, worker=worker)
        self._hosts.remove(worker)
        self._workers.pop(session, None)

    def _remember_worker(self, answer: SessionAnswer, worker: str) -> None:
        if answer.end is not None:
            self._workers.pop(answer.session, None)
        elif not answer.refusal:
            self._workers[answer.session] = worker


class Session:
    """One open session. Use it from one task at a time. Its name has to be one token of a subject (`InvalidName`)."""

    def __init__(self, client: SessionClient, name: str, *, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._number = 0
        self.name = check_name("session", name)

    async def request(self, kind: Any, **fields: Any) -> SessionAnswer:
        """One call; raises `SessionFailed` when it was refused or ended the session, `SessionUnavailable` in time."""
        call = SessionCall(session=self.name, call=kind, key=f"{self._number}", number=self._number, **fields)
        answer = await self._client.call(call, timeout=self._timeout)
        if answer.refusal or (answer.end is not None and kind != "close"):
            raise SessionFailed(answer)
        self._number += 1
        return answer

    async def reset(self, *, seed: int | None = None) -> SessionAnswer:
        """Begin an episode; ``messages`` and ``tools`` are what the policy sees first."""
        return await self.request("reset", seed=seed)

    async def step(self, text: str) -> SessionAnswer:
        """One action of the policy; tool calls are parsed from the text."""
        return await self.request("step", text=text)

    async def state(self) -> dict[str, Any]:
        """The environment's view of the episode."""
        return (await self.request("state")).state

    async def verify(self) -> SessionAnswer:
        """The grade: ``reward``, the total of the episode, or None and a ``reason``; ``unpaid`` is what the steps were not
        rewarded of it."""
        return await self.request("verify")

    async def close(self) -> None:
        """Release the environment; repeating is harmless. A worker that does not answer is no error, nor is a client that has
        ended, as one does that is cancelled together with its callers."""
        call = SessionCall(session=self.name, call="close", key="close")
        try:
            await self._client.call(call, timeout=CLOSE_SECONDS)
        except (SessionUnavailable, BusClosed) as error:
            run = self._client.subjects.run
            log.warning("session close failed; leaving it to its idle limit", run=run, session=self.name, reason=str(error))


def _find_holder(entry: StreamEntry) -> str:
    """The worker that wrote the newest entry of a journal; empty for a session that is over."""
    match read_entry(STORED["session"], entry):
        case SessionClaimed(worker=worker):
            return worker
        case SessionRecorded(answer=SessionAnswer(end=None, worker=worker)):
            return worker
    return ""


@asynccontextmanager
async def sessions(bus: Bus, subjects: Subjects) -> AsyncIterator[SessionClient]:
    """A client for the length of the body."""
    client = SessionClient(bus, subjects)
    async with open_first_error_task_group() as group:
        group.start_soon(client.run)
        yield client
        group.cancel_scope.cancel()
