"""One step-wise session in one slot: its calls one at a time, each journalled before it is answered.

Above it is the host, which made the claim; below is one environment. A call that is repeated gets the stored answer, or joins
the running one; a call that fails ends the session. The environment is closed in every case.
"""

from collections.abc import Callable
from typing import Any, get_args

import anyio
import msgspec
import structlog

from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.core.algorithms.reward_components import find_reward_problem
from fleetbus.core.algorithms.turn_credit import unpaid_reward
from fleetbus.core.episode.journal import Journal, JournalEntry, build_refusal
from fleetbus.core.text.tool_calls import parse_tool_calls
from fleetbus_schemas import Action, MalformedMessage, SessionAnswer, SessionCall, SessionEnded, SessionRecorded, Task
from fleetbus_schemas.session import SessionEnd
from fleetbus_workers.environment.base import Environment, HoldsElsewhere, Start, Step, Verdict
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages, Superseded
from fleetbus_workers.environment.normalization import clip_messages, to_plain_values
from fleetbus_workers.environment.stepwise.journal_log import LogUnavailable, append
from fleetbus_workers.environment.validation import validate_return
from fleetbus_workers.environment.worker_context import WorkerContext

MAX_WAITING_CALLS = 16
"""Calls of one session that may wait; further ones are refused as busy."""

_REPLAYED_CALLS = ("open", "reset", "step")

log = structlog.get_logger()


class _PendingCall:
    """A call that runs or waits; repetitions wait for the same answer."""

    __slots__ = ("_done", "answer")

    def __init__(self) -> None:
        self.answer: SessionAnswer | None = None
        self._done: anyio.Event | None = None  # hardly any call is repeated while it runs

    async def wait(self) -> SessionAnswer | None:
        """The answer, or None if there was none."""
        if self._done is None:
            self._done = anyio.Event()
        await self._done.wait()
        return self.answer

    def finish(self) -> None:
        if self._done is not None:
            self._done.set()


class StepwiseSession:
    """``journal`` has one's own claim as its last entry; ``is_full`` says whether it may grow no more. `is_over` is true once
    it has ended here."""

    def __init__(
        self,
        context: WorkerContext,
        journal: Journal,
        *,
        session: str,
        is_full: Callable[[Journal], bool],
        deadlines: Deadlines | None = None,
    ) -> None:
        assert journal.claim is not None
        self._is_full = is_full
        self._context = context
        self._journal = journal
        self._session = session
        self._claim = journal.claim
        self._task: Task = journal.claim.task
        self._stages = Stages(deadlines=deadlines)
        self._environment: Environment | None = None
        self._holder: HoldsElsewhere | None = None
        self._turn = -1
        self._rewards: list[float] = []
        self._is_episode_over = False
        self._pending: dict[str, _PendingCall] = {}
        self._call_lock = anyio.Lock(fast_acquire=True)
        self._started_at = self._idle_since = self._stages.now()
        self._is_closed = False
        self._endings = 0
        self._close_lock = anyio.Lock(fast_acquire=True)

    @property
    def is_over(self) -> bool:
        """True if it has ended, or is another worker's by now, and nothing of it is left here: the host may forget it."""
        return self._is_closed and not self._endings

    @property
    def journal_bytes(self) -> int:
        """The room that its journal takes in this worker's memory."""
        return self._journal.size_bytes

    @property
    def is_restorable(self) -> bool:
        """True if another worker could continue it: nothing was done that cannot be done again."""
        environment = self._environment
        return environment is None or environment.replayable or self._turn < 0

    def check_expiry(self, now: float) -> SessionEnd | None:
        """End it if its time is up; never during a call."""
        if self._pending or self._call_lock.locked() or self._is_closed:
            return None
        if now - self._idle_since > self._context.limits.idle:
            return "idle"
        return "total" if now - self._started_at > self._context.limits.episode else None

    async def answer(self, call: SessionCall) -> SessionAnswer:
        """Answer one call; it is executed once, however often it is made."""
        if stored := self._journal.answer(call):
            if stored.refusal != "gap" or not self._pending:
                return await self._confirm(stored)
        pending = self._pending.get(call.key)
        if pending is not None:
            return await pending.wait() or build_refusal(call, "moved", "the session went to another worker")
        if len(self._pending) >= MAX_WAITING_CALLS:
            return build_refusal(call, "busy", f"{MAX_WAITING_CALLS} calls of this session wait already")
        pending = self._pending[call.key] = _PendingCall()
        try:
            async with self._call_lock:
                pending.answer = await self._answer_once(call)
                return pending.answer
        finally:
            del self._pending[call.key]
            self._idle_since = self._stages.now()
            pending.finish()

    async def restore(self) -> None:
        """Do again what an earlier worker did, and see the same; otherwise the session ends ``lost``. Calls that come
        meanwhile wait: executed among the repeated ones, they would act on a state that the caller never saw."""
        async with self._call_lock:
            await self._restore()

    async def _restore(self) -> None:
        await release_held(self._context, self._journal)
        try:
            if reason := self._find_fullness():
                raise EpisodeEnded("lost", "journal_full", reason)
            for record in self._journal.records:
                if record.call.call not in _REPLAYED_CALLS:
                    continue
                answer = await self._perform(record.call)
                if not self.is_restorable:
                    raise EpisodeEnded("lost", "not_replayable", "its worker is gone, and it cannot be done again")
                if _comparable_part(answer) != _comparable_part(record.answer):
                    raise EpisodeEnded(
                        "lost", "diverged", f"call {record.answer.number} shows something else than was recorded"
                    )
        except EpisodeEnded as ended:
            self._require_held()
            await self.end(_map_session_end(ended), error_class=ended.error_class, error=ended.error)

    async def end(self, end: SessionEnd, *, key: str = "", error_class: str = "", error: str = "") -> None:
        """Close the environment and store the tombstone."""
        entry = SessionEnded(
            session=self._session, end=end, key=key, error_class=error_class, error=error, worker=self._context.worker
        )
        self._endings += 1
        try:
            await self.leave()
            await self._store(entry)
        finally:
            self._endings -= 1

    async def leave(self) -> None:
        """Close the environment and store nothing: the session may continue elsewhere."""
        self._is_closed = True
        self._endings += 1
        try:
            await self._close_environment()
        finally:
            self._endings -= 1

    async def _answer_once(self, call: SessionCall) -> SessionAnswer:
        if stored := self._journal.answer(call):  # what was done while it waited counts
            return await self._confirm(stored)
        if self._is_closed:
            return build_refusal(call, "moved", "the session went to another worker")
        if violation := self._check_order(call):
            return await self._confirm(build_refusal(call, "conflict", violation))
        try:
            if call.call == "close":
                await self.end("closed", key=call.key)
                return SessionAnswer(session=call.session, key=call.key, end="closed", worker=self._context.worker)
            if reason := self._find_fullness():
                return await self._end_at(call, "total", "journal_full", reason)
            try:
                return await self._perform_and_record(call)
            except MalformedMessage as malformed:  # nothing so large fits into the log: what was done cannot be recorded
                return await self._end_at(call, "env_failed", "too_large", malformed.reason)
        except Superseded:
            await self.leave()
            return build_refusal(call, "moved", "the session went to another worker")
        except LogUnavailable as unavailable:
            await self.leave()
            return build_refusal(call, "log", f"what was done is not recorded, and will be done again: {unavailable}")

    async def _end_at(self, call: SessionCall, end: SessionEnd, error_class: str, error: str) -> SessionAnswer:
        """Answer a call with the end of the session; raises as `_store`."""
        await self.end(end, key=call.key, error_class=error_class, error=error)
        return self._build_answer(call, end=end, error_class=error_class, error=error)

    def _find_fullness(self) -> str:
        """The reason for which the journal may grow no more; empty if it may."""
        if not self._is_full(self._journal):
            return ""
        return f"its journal has {self._journal.size_bytes >> 20} MiB: open another session"

    async def _confirm(self, answer: SessionAnswer) -> SessionAnswer:
        """A refusal that names a mistake of the caller's, unless the session went on elsewhere: then it is this worker that
        does not know what was done."""
        if answer.refusal not in ("gap", "conflict"):
            return answer
        stored = await self._context.bus.last(self._context.subjects.session(self._session))
        if stored is None or stored.sequence <= self._journal.last_sequence:
            return answer
        return msgspec.structs.replace(answer, refusal="moved", error="the session went to another worker")

    def _check_order(self, call: SessionCall) -> str:
        if call.call == "open":
            return "" if call.task is not None else "open needs a task"
        if self._environment is None and call.call != "reset":
            return "the session is not open"
        if call.call == "step" and self._turn < 0:
            return "reset comes before the first step"
        return "the episode is over: reset, or close" if call.call == "step" and self._is_episode_over else ""

    async def _perform_and_record(self, call: SessionCall) -> SessionAnswer:
        started = self._stages.now()
        try:
            answer = await self._perform(call)
        except EpisodeEnded as ended:
            answer = self._build_answer(call, end=_map_session_end(ended), error_class=ended.error_class, error=ended.error)
        self._require_held()
        await self._store(
            SessionRecorded(
                session=self._session,
                call=call,
                answer=answer,
                seconds=self._stages.now() - started,
                held=self._holder.held if self._holder is not None else "",
            )
        )
        if answer.end is not None:
            await self.leave()
        return answer

    async def _perform(self, call: SessionCall) -> SessionAnswer:
        """The environment's part of a call; raises `EpisodeEnded` when it fails or takes too long."""
        match call.call:
            case "open":
                await self._open(self._task)
                return self._build_answer(call)
            case "reset":
                return await self._reset(call)
            case "step":
                return await self._step(call)
            case "state":
                with self._stages.time_limit("state", self._context.limits.step):
                    return self._build_answer(call, state=to_plain_values(await self._require_environment().state()))
            case _:
                with self._stages.time_limit("verify", self._context.limits.verify):
                    environment = self._require_environment()
                    verdict = validate_return(Verdict, await environment.verify(), "verify", environment)
                    reward = verdict.reward
                    if reward is not None and find_reward_problem([reward], self._context.settings.max_abs_reward):
                        return self._build_answer(call, reason=f"the verdict is {reward}, which is not a valid reward")
                    unpaid = None if reward is None else unpaid_reward(reward, self._rewards)
                    return self._build_answer(call, reward=reward, unpaid=unpaid, reason=verdict.reason)

    def _require_held(self) -> None:
        """A call whose environment was closed meanwhile says nothing: the session continues where it is held next."""
        if self._is_closed:
            raise Superseded(f"session {self._session} was left during a call")

    def _require_environment(self) -> Environment:
        if self._environment is None:
            raise EpisodeEnded("env_failed", "not_open", "the session is not open")
        return self._environment

    async def _open(self, task: Task) -> None:
        self._task = task
        self._turn, self._is_episode_over = -1, False
        with self._stages.time_limit("open", self._context.limits.open):
            environment = self._environment = self._context.make(task)
            self._holder = environment if isinstance(environment, HoldsElsewhere) else None
            await environment.open(task)

    async def _reset(self, call: SessionCall) -> SessionAnswer:
        """Another seed, or a second episode, gets an environment of its own."""
        seed = self._task.seed if call.seed is None else call.seed
        if self._turn >= 0 or self._environment is None or seed != self._task.seed:
            await self._close_environment()
            await self._open(msgspec.structs.replace(self._task, seed=seed))
        with self._stages.time_limit("reset", self._context.limits.reset):
            environment = self._require_environment()
            start = validate_return(Start, await environment.reset(), "reset", environment)
            if start.seat:
                raise EpisodeEnded(
                    "env_failed", "seat", "this environment has seats, which a session cannot drive: use episodes"
                )
            messages = clip_messages(start.messages, self._context.settings.observation_bytes)
            state = to_plain_values(start.info)
        self._turn, self._rewards = 0, []
        return self._build_answer(
            call,
            messages=messages,
            tools=start.offered or start.tools,
            prompted=start.prompted,
            state=state,
        )

    async def _step(self, call: SessionCall) -> SessionAnswer:
        action = Action(
            episode_id=self._session,
            attempt=self._claim.attempt,
            turn=self._turn,
            text=call.text,
            tool_calls=call.tool_calls or parse_tool_calls(call.text).calls,
        )
        environment = self._require_environment()
        with self._stages.limit_step(environment, self._context.limits):
            step = validate_return(Step, await environment.step(action), "step", environment)
            self._turn += 1
            self._is_episode_over = step.terminated or step.truncated
            if problem := find_reward_problem([step.reward], self._context.settings.max_abs_reward):
                raise EpisodeEnded("env_failed", problem, f"the step was rewarded {step.reward}")
            self._rewards.append(step.reward)
            return self._build_answer(
                call,
                messages=clip_messages(step.messages, self._context.settings.observation_bytes),
                reward=None if step.unrewarded else step.reward,
                reason=step.unrewarded,
                terminated=step.terminated,
                truncated=step.truncated,
                tool_calls=step.tool_calls,
                tool_errors=step.tool_errors,
                state=to_plain_values(step.info),
                output=step.output,
                context=None if self._is_episode_over else step.context,
            )

    def _build_answer(self, call: SessionCall, **fields: Any) -> SessionAnswer:
        number = self._journal.next_number
        return SessionAnswer(session=call.session, key=call.key, number=number, worker=self._context.worker, **fields)

    async def _close_environment(self) -> None:
        """Close the environment; a second caller waits until it is closed: its slot is free after that."""
        async with self._close_lock:
            environment, self._environment = self._environment, None
            if environment is None:
                return
            try:
                with self._stages.time_limit("close", self._context.limits.close, shield=True):
                    await environment.close()
            except EpisodeEnded as ended:
                log.warning("environment close failed; continuing", session=self._session, reason=ended.error)

    async def _store(self, entry: JournalEntry) -> None:
        """Append to the journal; raises `Superseded` or `LogUnavailable`, then the session may answer nothing more."""
        await append(self._context.bus, self._context.subjects, self._session, self._journal, entry)


async def release_held(context: WorkerContext, journal: Journal) -> None:
    """Release what a dead worker's environment still holds elsewhere, as its journal says; a failure is only a warning: what is
    held there expires some time."""
    held = journal.records[-1].held if journal.records else ""
    if not held or journal.claim is None:
        return
    try:
        with anyio.fail_after(context.limits.close):
            environment = context.make(journal.claim.task)
            if isinstance(environment, HoldsElsewhere):
                await environment.release(journal.claim.task, held)
    except Exception as error:  # noqa: BLE001 - an environment may fail in any way
        log.warning("release of a dead worker's resources failed; continuing", session=journal.claim.session, reason=str(error))


def _comparable_part(answer: SessionAnswer) -> SessionAnswer:
    """The part of an answer on which two executions of one call have to agree: what a policy sees of it, and its reward."""
    return msgspec.structs.replace(answer, worker="", number=-1, state={}, tools=(), prompted=0, output=None)


def _map_session_end(ended: EpisodeEnded) -> SessionEnd:
    """An outcome as the end of a session."""
    known: dict[str, SessionEnd] = {end: end for end in get_args(SessionEnd)}
    return known.get(ended.outcome, "env_failed")
