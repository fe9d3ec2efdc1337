"""Calls of one agent, waiting for its episode: an HTTP request on one side, an environment's step on the other.

A call whose answer has not been delivered is joined by the same body, for agents repeat calls when a connection ends; after
that only by one that says that it is a repetition (`x-stainless-retry-count`, `Idempotency-Key`): without that mark it is
another sample. Nothing waits for ever: the end of a session answers every call, those that come later included.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import anyio
import msgspec

from fleetbus.concurrency.wakeup import Wakeup
from fleetbus_workers.environment.adapters.agent.call_ids import CallIds
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer, InvalidCall
from fleetbus_workers.environment.adapters.agent.faults import Refused
from fleetbus_workers.environment.adapters.agent.models import OTHER_SEAT, SEAT_PREFIX
from fleetbus_workers.environment.adapters.agent.paths import digest_question
from fleetbus_workers.environment.adapters.agent.stored_responses import StoredResponses

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

MOVED = "the session is not served here at the moment: repeat the call"
UNKNOWN_KEY = "this key belongs to no running session"
REWARD_PREFIX = "fbr-"
NO_REWARD_KEY = "a reward is posted with the reward key of the session, which the key of its calls is not"
SESSION_OVER = "The session is over: no further turns. Stop now."


class AgentEnded(Exception):
    """No further call comes."""


class TooManyCalls(Exception):
    """HTTP 429."""


class SessionMoved(Exception):
    """HTTP 503: the episode is played elsewhere, or will be; a repetition finds it."""


class KeyRefused(Exception):
    """HTTP 401: no key of a session."""


class SessionDirectory(Protocol):
    """Finds the session of a key."""

    async def find(self, keys: Sequence[str]) -> AgentSession:
        """The session of the first of these keys that is one. Raises `KeyRefused`, `SessionMoved`, `TooManyCalls`."""


class PendingCall:
    """A call that has no answer yet, or had one. ``waiters`` are the requests that want it."""

    def __init__(self, call: AgentCall, digest: str = "") -> None:
        self.call = call
        self.digest = digest
        self.answer: Answer | InvalidCall | SessionMoved | None = None
        self.waiters = 0
        self.connected = 0
        """Requests that want the answer and whose clients are there."""
        self.delivered = False
        """Whether a client has had the answer, as far as one can tell."""
        self.first_request_until = -math.inf
        """Until when the request that this one repeats may still come, overtaken on its way."""
        self._answered = anyio.Event()

    async def wait(self) -> Answer:
        """Raises `InvalidCall` if it was refused, `SessionMoved` if it is to be repeated."""
        await self._answered.wait()
        assert self.answer is not None
        if isinstance(self.answer, Exception):
            raise type(self.answer)(str(self.answer))
        return self.answer

    @property
    def is_lost(self) -> bool:
        """True if its client went away without the answer: the same question again is the same call."""
        return not self.delivered and not self.connected

    def takes_first_request(self) -> bool:
        """True if an unmarked request is the one that was repeated before it came; once."""
        is_due, self.first_request_until = anyio.current_time() < self.first_request_until, -math.inf
        return is_due

    @asynccontextmanager
    async def hold_request(self) -> AsyncIterator[None]:
        """One more request wants the answer; a little longer than it lasts, for its client may come again."""
        self.waiters += 1
        self.connected += 1
        try:
            yield
        finally:
            self.connected -= 1
            if not self._answered.is_set():
                with anyio.move_on_after(DISCONNECTED_SECONDS, shield=True):
                    await self._answered.wait()
            self.waiters -= 1

    def set_answer(self, answer: Answer | InvalidCall | SessionMoved) -> bool:
        """The first answer counts: whether this is it. What was asked is not kept: it may be large, and many are remembered."""
        if self.answer is not None:
            return False
        self.answer = answer
        self.call = AgentCall(messages=())
        self._answered.set()
        return True


class AgentSession:
    """One episode's calls. ``key`` is its secret: who has it speaks for the agent until the session ends, but cannot grade it:
    that takes ``reward_key``. ``takes_reward``: who started the agent may grade it, for there is nobody else."""

    def __init__(self, *, takes_reward: bool = True, key: str = "") -> None:
        self.key = key or f"fbs-{secrets.token_hex(24)}"
        self.reward_key = f"{REWARD_PREFIX}{secrets.token_hex(24)}"
        self.call_ids = CallIds(self.key)
        self.responses = StoredResponses()
        self.takes_reward = takes_reward
        self.takes_late_reward = False
        """Whether the agent may still grade itself when its calls are answered with a request to stop."""
        self.requests = 0
        self.reward: float | None = None
        self.reward_reason = ""
        self.seats: Mapping[str, float | None] = {}
        """The rewards of its seats."""
        self.is_graded = False
        self.over = False
        self.moved = False
        self.concluded = anyio.Event()
        """Set when the agent has ended, or says so itself; see `conclude`."""
        self.closed = anyio.Event()
        self.left_out: set[str] = set()
        """Kinds of tools that were left out of its calls, each of which is logged once."""
        self.refused: Refused | None = None
        """The call that was refused last, since the last answer."""
        self.refuses_formats = False
        """Whether a call that wants a format of its answer is refused."""
        self.repeated = 0
        """Repetitions that joined a call or got its answer."""
        self._waiting: deque[PendingCall] = deque()
        self._changed = Wakeup()
        self._remembered: OrderedDict[str, PendingCall] = OrderedDict()
        self._restored: dict[str, PendingCall] = {}
        self._taken: list[PendingCall] = []
        """Those that were taken and had no answer then."""

    def remember(self, asked: str) -> PendingCall:
        """A call that another process has taken, for repetitions of what was asked (`digest_question`)."""
        return self._restored.setdefault(asked, PendingCall(AgentCall(messages=())))

    def enter(self, call: AgentCall, digest: str, *, repetition: bool) -> PendingCall:
        """The call in its queue, or the one that it repeats; played while it is `PendingCall.wanted`. Raises `TooManyCalls`,
        `SessionMoved`, `InvalidCall`."""
        if self.moved:
            raise SessionMoved(MOVED)
        call = self._restore_calls(call)
        if not self.over:
            call = self.responses.expand(call)
        known = self._find_known(call, digest)
        if known is not None and (repetition or known.is_lost or known.takes_first_request()):
            self.repeated += 1
            return known
        pending = PendingCall(call, digest)
        if repetition:
            pending.first_request_until = anyio.current_time() + OVERTAKEN_SECONDS
        if self.over:
            pending.set_answer(build_last_answer())
            return pending
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyCalls(f"{MAX_WAITING} calls of this session wait already")
        self._waiting.append(pending)
        self._changed.set()
        self._remembered[digest] = pending
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return pending

    def _restore_calls(self, call: AgentCall) -> AgentCall:
        return msgspec.structs.replace(call, messages=self.call_ids.restore(call.messages, call.tools))

    def _find_known(self, call: AgentCall, digest: str) -> PendingCall | None:
        known = self._remembered.get(digest)
        if known is None and self._restored:
            named = call.model.partition(SEAT_PREFIX)[2]
            for seat in (named,) if named else ("", OTHER_SEAT):
                known = known or self._restored.get(digest_question(call.messages, call.tools, seat))
        return known

    def is_asked_again(self, call: AgentCall, digest: str, *, repetition: bool) -> bool:
        """True if `enter` would join such a call with one that it knows."""
        known = self._find_known(self._restore_calls(call), digest)
        return known is not None and (repetition or known.is_lost or anyio.current_time() < known.first_request_until)

    def list_answers(self) -> list[Answer | None]:
        """The answers that are remembered, newest first; None for a call that has none yet."""
        calls = (*self._restored.values(), *self._remembered.values())
        return [call.answer if isinstance(call.answer, Answer) else None for call in reversed(calls)]

    async def next_call(self) -> PendingCall:
        """The next call that somebody still waits for. Raises `AgentEnded`."""
        while not self.concluded.is_set():
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            pending = self._waiting.popleft()
            if self.is_wanted(pending):
                self._taken = [*(taken for taken in self._taken if taken.answer is None), pending]
                return pending
        raise AgentEnded

    def is_wanted(self, pending: PendingCall) -> bool:
        """True if somebody waits for a call that is not in play yet; else it is forgotten: a repetition of it would wait for
        ever."""
        if pending.waiters:
            return True
        pending.set_answer(SessionMoved(MOVED))
        if self._remembered.get(pending.digest) is pending:
            del self._remembered[pending.digest]
        return False

    def conclude(self) -> None:
        """The agent has ended: nobody waits for a call of it any more."""
        self.concluded.set()
        self._changed.set()

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

    def grade(self, reward: float | None, reason: str = "", seats: Mapping[str, float | None] | None = None) -> bool:
        """The agent's own reward, and those of its seats, once; None excludes the episode. False if there is one already, it is
        no number, or it is a verifier's."""
        too_late = self.moved or self.closed.is_set() or (self.over and not self.takes_late_reward)
        is_finite = all(math.isfinite(each) for each in (reward, *(seats or {}).values()) if each is not None)
        if not self.takes_reward or self.is_graded or too_late or not is_finite:
            return False
        self.is_graded, self.reward, self.seats = True, reward, seats or {}
        self.reward_reason = reason or ("the agent gave no reward" if reward is None else "")
        return True

    def has_taken(self, reward: float | None) -> bool:
        """True if this is the reward that was given here: one that is posted again was taken."""
        return self.is_graded and self.reward == reward

    def end(self) -> None:
        """Answer every call that waits, and all that come, with a message that asks the agent to stop."""
        self.over = True
        self._answer_all(build_last_answer())

    def move(self) -> None:
        """Have every call that waits repeated, and all that come: the episode is not over, but no longer played here."""
        if not self.over:
            self.moved = True
            self._answer_all(SessionMoved(MOVED))

    def _answer_all(self, answer: Answer | SessionMoved) -> None:
        for taken in self._taken:
            taken.set_answer(answer)
        while self._waiting:
            self._waiting.popleft().set_answer(answer)

    def close(self) -> None:
        if not self.moved:
            self.end()
        self.closed.set()


class LocalSessions:
    """The sessions of one process, known while they run."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._graded: dict[str, AgentSession] = {}

    def find_graded(self, keys: Sequence[str]) -> AgentSession:
        """The session that one of these is the reward key of. Raises `KeyRefused`."""
        found = next((self._graded[key] for key in keys if key in self._graded), None)
        if found is None:
            raise KeyRefused(NO_REWARD_KEY)
        return found

    async def find(self, keys: Sequence[str]) -> AgentSession:
        found = next((self._sessions[key] for key in keys if key in self._sessions), None)
        if found is None:
            raise KeyRefused(UNKNOWN_KEY)
        return found

    @contextmanager
    def open(self, *, takes_reward: bool = True) -> Iterator[AgentSession]:
        """A session whose key is known here until the end."""
        session = AgentSession(takes_reward=takes_reward)
        self._sessions[session.key] = self._graded[session.reward_key] = session
        try:
            yield session
        finally:
            session.close()
            del self._sessions[session.key], self._graded[session.reward_key]

    def end_all(self) -> None:
        for session in self._sessions.values():
            session.end()


def build_last_answer() -> Answer:
    """Not empty: some agents ask again after an empty answer."""
    return Answer(number=0, text=SESSION_OVER)
