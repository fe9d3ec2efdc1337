"""Calls of one agent, waiting for its episode: an HTTP request on one side, an environment's step on the other.

An SDK that repeats a call says so (`x-stainless-retry-count`, `Idempotency-Key`): the same body then joins the call that runs
or gets the answer that was given. The same body without that mark is another sample. Nothing waits for ever: the end of a
session answers every call, those that come later included.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer, InvalidCall

MAX_WAITING = 64
"""Calls of one session that wait at a time; a further one is answered 429."""

MAX_REQUESTS = 96
"""Requests of one session in work at a time, repetitions included; a further one is answered 429."""

MAX_REMEMBERED = 256
"""Calls whose answers are kept for repetitions."""

DISCONNECTED_SECONDS = 5.0
"""How long a call is kept in its queue for the repetition of a client that went away."""

OVERTAKEN_SECONDS = 5.0
"""How long a request may be on its way after its own repetition came."""

SESSION_OVER = "The session is over: no further turns. Stop now."


class TooManyCalls(Exception):
    """HTTP 429."""


class PendingCall:
    """A call that has no answer yet, or had one. ``waiters`` are the requests that want it."""

    def __init__(self, call: AgentCall, digest: str = "") -> None:
        self.call = call
        self.digest = digest
        self.answer: Answer | InvalidCall | None = None
        self.waiters = 0
        self.first_request_until = -math.inf
        """Until when the request that this one repeats may still come, overtaken on its way."""
        self._answered = anyio.Event()

    async def wait(self) -> Answer:
        """Raises `InvalidCall` if it was refused."""
        await self._answered.wait()
        assert self.answer is not None
        if isinstance(self.answer, InvalidCall):
            raise InvalidCall(str(self.answer))
        return self.answer

    def takes_first_request(self) -> bool:
        """Whether an unmarked request is the one that was repeated before it came; once."""
        is_due, self.first_request_until = anyio.current_time() < self.first_request_until, -math.inf
        return is_due

    @asynccontextmanager
    async def wanted(self) -> AsyncIterator[None]:
        """One more request wants the answer; a little longer than it lasts, for its client may come again."""
        self.waiters += 1
        try:
            yield
        finally:
            if not self._answered.is_set():
                with anyio.move_on_after(DISCONNECTED_SECONDS, shield=True):
                    await self._answered.wait()
            self.waiters -= 1

    def set_answer(self, answer: Answer | InvalidCall) -> None:
        """The first answer counts. What was asked is not kept: it may be large, and many are remembered."""
        if self.answer is None:
            self.answer = answer
            self.call = AgentCall(messages=())
            self._answered.set()


class AgentSession:
    """One episode's calls. ``key`` is its secret: who has it speaks for the agent until the session ends. ``takes_reward``: the
    agent may grade itself, for there is nobody else."""

    def __init__(self, *, takes_reward: bool = True) -> None:
        self.key = f"fbs-{secrets.token_hex(24)}"
        self.takes_reward = takes_reward
        self.requests = 0
        self.reward: float | None = None
        self.reward_reason = ""
        self.is_graded = False
        self.over = False
        self.repeated = 0
        """Repetitions that joined a call or got its answer."""
        self._send, self._receive = anyio.create_memory_object_stream[PendingCall](MAX_WAITING)
        self._remembered: OrderedDict[str, PendingCall] = OrderedDict()
        self._taken: PendingCall | None = None

    def enter(self, call: AgentCall, digest: str, *, repetition: bool) -> PendingCall:
        """The call in its queue, or the one that it repeats; played while it is `PendingCall.wanted`. Raises `TooManyCalls`."""
        known = self._remembered.get(digest)
        if known is not None and (repetition or known.takes_first_request()):
            self.repeated += 1
            return known
        pending = PendingCall(call, digest)
        if repetition:
            pending.first_request_until = anyio.current_time() + OVERTAKEN_SECONDS
        if self.over:
            pending.set_answer(build_last_answer())
            return pending
        try:
            self._send.send_nowait(pending)
        except anyio.WouldBlock:
            raise TooManyCalls(f"{MAX_WAITING} calls of this session wait already") from None
        self._remembered[digest] = pending
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return pending

    async def next_call(self) -> PendingCall:
        """The next call that somebody still waits for."""
        while True:
            pending = await self._receive.receive()
            if pending.waiters:
                self._taken = pending
                return pending
            if self._remembered.get(pending.digest) is pending:
                del self._remembered[pending.digest]  # a repetition of it would wait for ever

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """A request in work. Raises `TooManyCalls`."""
        if self.requests >= MAX_REQUESTS:
            raise TooManyCalls(f"{MAX_REQUESTS} requests of this session are in work already")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def grade(self, reward: float | None, reason: str = "") -> bool:
        """The agent's own reward, once; None excludes the episode. False if there is one already, it is no number, or it is a
        verifier's."""
        if not self.takes_reward or self.is_graded or self.over or (reward is not None and not math.isfinite(reward)):
            return False
        self.is_graded, self.reward, self.reward_reason = True, reward, reason
        return True

    def end(self) -> None:
        """Answer every call that waits, and all that come, with a message that asks the agent to stop."""
        self.over = True
        if self._taken is not None:
            self._taken.set_answer(build_last_answer())
        while True:
            try:
                self._receive.receive_nowait().set_answer(build_last_answer())
            except (anyio.WouldBlock, anyio.EndOfStream):
                return

    def close(self) -> None:
        self.end()
        self._send.close()
        self._receive.close()


def build_last_answer() -> Answer:
    """Not empty: some agents ask again after an empty answer."""
    return Answer(number=0, text=SESSION_OVER)
