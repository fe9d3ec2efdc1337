"""One step-wise session in one slot: its calls one at a time, each journalled before it is answered.

Above it is the host, which made the claim; below is one environment. A call that is repeated gets the stored answer, or joins
the running one; a call that fails ends the session. The environment is closed in every case.
"""

from __future__ import annotations

import math
import operator
from typing import Any, get_args

import anyio
import msgspec
import structlog

from fleetbus.core.journal import Journal, JournalEntry, refused
from fleetbus.core.tool_calls import parse_tool_calls
from fleetbus_schemas import Action, MalformedMessage, SessionAnswer, SessionCall, SessionEnded, SessionRecorded, Task
from fleetbus_schemas.session import SessionEnd
from fleetbus_workers.environment.attempts import Crew
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.outputs import checked_messages, clipped, plain_number, plain_values
from fleetbus_workers.environment.stages import EpisodeEnded, Stages, Superseded
from fleetbus_workers.environment.stepwise.journal import append

MOST_WAITING = 16
"""Calls of one session that wait for their turn; further ones are told to come again."""

STORE_SECONDS = 60.0
"""How long an answer waits for room in the log before its session is given up here."""

_REAPPLIED = ("open", "reset", "step")

log = structlog.get_logger()


class _Waiting:
    """A call that runs or waits; whoever repeats it waits for the same answer."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: SessionAnswer | None = None


class HostedSession:
    """``journal`` has one's own claim as its last entry. ``dropped`` is set once nothing of it is left here."""

    def __init__(self, crew: Crew, journal: Journal, *, session: str) -> None:
        assert journal.claim is not None
        self._crew = crew
        self._journal = journal
        self._session = session
        self._claim = journal.claim
        self._task: Task = journal.claim.task
        self._stages = Stages()
        self._environment: Environment | None = None
        self._turn = -1
        self._over = False
        self._waiting: dict[str, _Waiting] = {}
        self._one_at_a_time = anyio.Lock()
        self._begun_at = self._idle_since = anyio.current_time()
        self._left = False

    @property
    def over(self) -> bool:
        """True if it has ended, or is another worker's by now: the host may forget it."""
        return self._left or self._journal.ended is not None

    @property
    def stays_whole(self) -> bool:
        """True if another worker could go on with it: nothing was done that cannot be done again."""
        environment = self._environment
        return environment is None or environment.replayable or self._turn < 0

    def expired(self, now: float) -> SessionEnd | None:
        """Whether its time is up; never during a call."""
        if self._waiting or self.over:
            return None
        if now - self._idle_since > self._crew.limits.idle:
            return "idle"
        return "total" if now - self._begun_at > self._crew.limits.episode else None

    async def answer(self, call: SessionCall) -> SessionAnswer:
        """What one call leads to, once, however often it is made."""
        if stored := self._journal.answer(call):
            if stored.refusal != "gap" or not self._waiting:
                return stored
        waiting = self._waiting.get(call.key)
        if waiting is not None:
            await waiting.done.wait()
            return waiting.answer or refused(call, "moved", "the session went to another worker")
        if len(self._waiting) >= MOST_WAITING:
            return refused(call, "busy", f"{MOST_WAITING} calls of this session wait already")
        waiting = self._waiting[call.key] = _Waiting()
        try:
            async with self._one_at_a_time:
                waiting.answer = await self._answered(call)
                return waiting.answer
        finally:
            del self._waiting[call.key]
            self._idle_since = anyio.current_time()
            waiting.done.set()

    async def restore(self) -> None:
        """Do again what an earlier worker did, and see the same; otherwise the session ends ``lost``."""
        records = [record for record in self._journal.records if record.call.call in _REAPPLIED]
        try:
            for record in records:
                answer = await self._performed(record.call)
                if not self.stays_whole:
                    raise EpisodeEnded("lost", "not_replayable", "its worker is gone, and it cannot be done again")
                if _observable(answer) != _observable(record.answer):
                    raise EpisodeEnded(
                        "lost", "diverged", f"call {record.answer.number} shows something else than was recorded"
                    )
        except EpisodeEnded as ended:
            await self.end(_end(ended), error_class=ended.error_class, error=ended.error)

    async def end(self, end: SessionEnd, *, key: str = "", error_class: str = "", error: str = "") -> None:
        """Close the environment and store the tombstone."""
        await self.leave()
        entry = SessionEnded(
            session=self._session, end=end, key=key, error_class=error_class, error=error, worker=self._crew.worker
        )
        await self._store(entry)

    async def leave(self) -> None:
        """Close the environment and store nothing: the session may go on elsewhere."""
        self._left = True
        await self._close_environment()

    async def _answered(self, call: SessionCall) -> SessionAnswer:
        if stored := self._journal.answer(call):  # what was done while it waited counts
            return stored
        if self._left:
            return refused(call, "moved", "the session went to another worker")
        if wrong := self._out_of_place(call):
            return refused(call, "conflict", wrong)
        try:
            if call.call == "close":
                await self.end("closed", key=call.key)
                return SessionAnswer(session=call.session, key=call.key, end="closed", worker=self._crew.worker)
            return await self._recorded(call)
        except Superseded:
            await self.leave()
            return refused(call, "moved", "the session went to another worker")
        except MalformedMessage as malformed:  # nothing so large fits into the log: what was done cannot be recorded
            words = malformed.reason
            await self.end("env_failed", key=call.key, error_class="too_large", error=words)
            return self._blank(call, end="env_failed", error_class="too_large", error=words)
        except NoRoom:
            await self.leave()
            return refused(call, "log", "the log has no room: what was done is not recorded, and will be done again")

    def _out_of_place(self, call: SessionCall) -> str:
        if call.call == "open":
            return "" if call.task is not None else "open needs a task"
        if self._environment is None and call.call != "reset":
            return "the session is not open"
        if call.call == "step" and self._turn < 0:
            return "reset comes before the first step"
        return "the episode is over: reset, or close" if call.call == "step" and self._over else ""

    async def _recorded(self, call: SessionCall) -> SessionAnswer:
        started = anyio.current_time()
        try:
            answer = await self._performed(call)
        except EpisodeEnded as ended:
            answer = self._blank(call, end=_end(ended), error_class=ended.error_class, error=ended.error)
        await self._store(
            SessionRecorded(session=self._session, call=call, answer=answer, seconds=anyio.current_time() - started)
        )
        if answer.end is not None:
            await self.leave()
        return answer

    async def _performed(self, call: SessionCall) -> SessionAnswer:
        """The environment's part of a call; raises `EpisodeEnded` when it fails or takes too long."""
        match call.call:
            case "open":
                await self._open(self._task)
                return self._blank(call)
            case "reset":
                return await self._reset(call)
            case "step":
                return await self._step(call)
            case "state":
                with self._stages.within("state", self._crew.limits.step):
                    return self._blank(call, state=plain_values(await self._opened().state()))
            case _:
                with self._stages.within("verify", self._crew.limits.verify):
                    verdict = await self._opened().verify()
                    reward = None if verdict.reward is None else plain_number(verdict.reward)
                    if reward is not None and not math.isfinite(reward):
                        return self._blank(call, reason=f"the verdict is {reward}, which is no grade")
                    return self._blank(call, reward=reward, reason=verdict.reason)

    def _opened(self) -> Environment:
        if self._environment is None:
            raise EpisodeEnded("env_failed", "not_open", "the session is not open")
        return self._environment

    async def _open(self, task: Task) -> None:
        self._task = task
        self._turn, self._over = -1, False
        with self._stages.within("open", self._crew.limits.open):
            self._environment = self._crew.make(task)
            await self._environment.open(task)

    async def _reset(self, call: SessionCall) -> SessionAnswer:
        """Another seed, or a second episode, gets an environment of its own."""
        seed = self._task.seed if call.seed is None else call.seed
        if self._turn >= 0 or self._environment is None or seed != self._task.seed:
            await self._close_environment()
            await self._open(msgspec.structs.replace(self._task, seed=seed))
        with self._stages.within("reset", self._crew.limits.reset):
            start = await self._opened().reset()
            messages = clipped(checked_messages(start.messages), self._crew.settings.observation_bytes)
        self._turn = 0
        return self._blank(call, messages=messages, tools=tuple(start.tools), state=plain_values(start.info))

    async def _step(self, call: SessionCall) -> SessionAnswer:
        action = Action(
            episode_id=self._session,
            attempt=self._claim.attempt,
            turn=self._turn,
            text=call.text,
            tool_calls=call.tool_calls or parse_tool_calls(call.text).calls,
        )
        with self._stages.within("step", self._crew.limits.step):
            step = await self._opened().step(action)
            self._turn += 1
            self._over = step.terminated or step.truncated
            reward = plain_number(step.reward)
            if not math.isfinite(reward):
                raise EpisodeEnded("env_failed", "reward_not_finite", f"the step was rewarded {reward}")
            return self._blank(
                call,
                messages=clipped(checked_messages(step.messages), self._crew.settings.observation_bytes),
                reward=reward,
                terminated=bool(step.terminated),
                truncated=bool(step.truncated),
                tool_calls=operator.index(step.tool_calls),
                tool_errors=operator.index(step.tool_errors),
                state=plain_values(step.info),
            )

    def _blank(self, call: SessionCall, **fields: Any) -> SessionAnswer:
        number = self._journal.next_number
        return SessionAnswer(session=call.session, key=call.key, number=number, worker=self._crew.worker, **fields)

    async def _close_environment(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            with self._stages.within("close", self._crew.limits.close, shield=True):
                await environment.close()
        except EpisodeEnded as ended:
            log.warning("environment not closed cleanly", session=self._session, reason=ended.error)

    async def _store(self, entry: JournalEntry) -> None:
        """Append to the journal; raises `Superseded` or `NoRoom`, after which nothing of this session may be answered."""
        try:
            with anyio.fail_after(STORE_SECONDS):
                await append(self._crew.bus, self._crew.subjects, self._session, self._journal, entry)
        except TimeoutError as error:
            raise NoRoom from error


class NoRoom(Exception):
    """The log took nothing for too long."""


def _observable(answer: SessionAnswer) -> SessionAnswer:
    """What two executions of one call have to agree on."""
    return msgspec.structs.replace(answer, worker="", number=-1, state={})


def _end(ended: EpisodeEnded) -> SessionEnd:
    """An outcome as the end of a session."""
    known: dict[str, SessionEnd] = {end: end for end in get_args(SessionEnd)}
    return known.get(ended.outcome, "env_failed")
