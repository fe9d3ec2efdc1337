"""One session of the OpenEnv gateway: the protocol's calls as calls to sessions on the bus, and the answers as observations.

A session has a name, and each environment it uses in turn is a session on the bus, ``<name>-0``, ``<name>-1``, ... What it was
doing is read from their journals, so that any gateway can continue it. Every tool call is a step, however it comes.
"""

import hashlib
import secrets
from typing import Any

import anyio
import msgspec

from fleetbus.client.sessions import SessionClient, SessionUnavailable
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import BusError
from fleetbus_schemas import MalformedMessage, SessionAnswer, SessionCall, Task, ToolCall, ToolSpec
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.gateway.images import LoadImage
from fleetbus_workers.gateway.openenv_frames import (
    FrameError,
    describe_tools,
    read_action,
    read_id,
    read_request_id,
    read_seed,
    write_observation,
)

RESET_KEYS = ("seed", "episode_id")
TASK_KEYS = {"task_key": "key", "env_key": "env", "prompt": "prompt"}
CLOSE_SECONDS = 40.0
NOT_STARTED = "the episode is over or has not begun: reset first"


class AtCapacity(Exception):
    """No slot was free in time; the connection ends."""


class OpenEnvEpisode:
    """``capacity_seconds``: how long a reset waits for a slot; ``call_seconds``: how long any other call may take. Calls of one
    session wait for each other."""

    def __init__(
        self,
        client: SessionClient,
        *,
        capacity_seconds: float,
        call_seconds: float,
        name: str = "",
        load: LoadImage | None = None,
    ) -> None:
        self.name = name or secrets.token_hex(16)
        self._key, self._keys = secrets.token_hex(8), 0
        self._client = client
        self._capacity_seconds = capacity_seconds
        self._call_seconds = call_seconds
        self._load = load
        self._lock = anyio.Lock(fast_acquire=True)
        self._number = -1  # of the environment in use, or last used
        self._is_live = False
        self._is_over = True
        self._task: Task | None = None
        self._label = ""
        self._resets = self._expected = 0
        self.tools: tuple[ToolSpec, ...] = ()
        self.steps = 0

    @property
    def is_active(self) -> bool:
        """True if there is an environment to step."""
        return self._is_live

    async def attach(self) -> bool:
        """Continue where another gateway, or connection, stopped; False if this name was never used."""
        async with self._lock:
            await self._load_journals()
        return self._number >= 0

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode; other settings than before get an environment of their own."""
        seed, label = read_seed(data.get("seed")), read_id(data.get("episode_id"))
        task = _task({name: value for name, value in data.items() if name not in RESET_KEYS}, seed)
        async with self._lock:
            if self._is_live and not _is_same_task(task, self._task):
                await self._close()
            if not self._is_live:
                await self._open(task)
            answer = await self._call_session("reset", seed=seed)
            self._label = label
            return await write_observation(answer, self._load) | {"reward": None, "done": False}

    async def step(self, data: dict[str, Any], *, request_id: str = "", timeout: float | None = None) -> dict[str, Any]:
        """One action; raises `FrameError` when it cannot be read or comes at the wrong time.

        A repetition under the same ``request_id`` gets the answer of the first, or joins it if it still runs.
        """
        if data.get("type") == "list_tools":
            return {"observation": {"tools": describe_tools(self.tools)}, "reward": None, "done": False}
        text, calls = read_action(data)
        step_id = request_id or read_request_id(data)
        async with self._lock:
            if self._number < 0 or not self._resets or (not step_id and (not self._is_live or self._is_over)):
                raise FrameError("EXECUTION_ERROR", NOT_STARTED, status=409)
            key = _hash_text(f"{self._resets}:{step_id}") if step_id else self._new_key()
            return await self._step_session(key, text, calls, timeout)

    async def _step_session(self, key: str, text: str, calls: tuple[ToolCall, ...], timeout: float | None) -> dict[str, object]:
        answer = await self._call_session("step", key=key, timeout=timeout, text=text, tool_calls=calls)
        over = answer.terminated or answer.truncated
        reward, reason = answer.reward, answer.reason
        if over:
            verdict = await self._call_session("verify", key=f"{key}v")
            reward = None if verdict.unpaid is None else (reward or 0.0) + verdict.unpaid
            reason = verdict.reason or "the episode has no verdict"
        if reward is None:
            answer = msgspec.structs.replace(answer, state=answer.state | {"reward_reason": reason})
        tool = calls[0].name if calls else ""
        return await write_observation(answer, self._load, tool=tool) | {"reward": reward, "done": over}

    async def state(self) -> dict[str, Any]:
        """``episode_id`` and ``step_count``, and what the environment says of itself while it is there."""
        async with self._lock:
            environment_state = (await self._call_session("state")).state if self._is_live else {}
            name = self._label or (f"{self.name}-{self._number}" if self._number >= 0 else None)
            return environment_state | {"episode_id": name, "step_count": self.steps}

    async def close(self) -> None:
        """Release the slot; harmless if there is none."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        live, self._is_live = self._is_live, False
        self._is_over = True
        if live:
            call = SessionCall(session=self._session, call="close", key="close")
            await self._client.call(call, timeout=CLOSE_SECONDS)

    def _new_key(self) -> str:
        """A key that no other call has, of any gateway."""
        self._keys += 1
        return f"{self._key}{self._keys:x}"

    @property
    def _session(self) -> str:
        return f"{self.name}-{self._number}"

    async def _open(self, task: Task) -> None:
        self._number, self._task = self._number + 1, task
        self._resets = self._expected = self.steps = 0
        self._is_live = True
        try:
            await self._call_session("open", key="open", timeout=self._capacity_seconds, task=task)
        except (SessionUnavailable, BusError) as error:
            self._number, self._is_live = self._number - 1, False  # no number is left out
            if isinstance(error, BusError):
                raise
            raise AtCapacity(str(error)) from error

    async def _call_session(self, kind: Any, *, key: str = "", timeout: float | None = None, **fields: Any) -> SessionAnswer:
        """An answer that was executed, now or before; raises `FrameError` otherwise."""
        call = SessionCall(session=self._session, call=kind, key=key or self._new_key(), **fields)
        try:
            answer = await self._client.call(call, timeout=timeout or self._call_seconds)
        except MalformedMessage as malformed:
            raise FrameError("VALIDATION_ERROR", f"this cannot be encoded: {malformed.reason}") from malformed
        if answer.refusal and answer.end is None:
            if kind == "open":  # one that was given up, and came about after all
                await self._load_journals()
            raise FrameError("EXECUTION_ERROR", answer.error)
        if answer.end is not None:
            self._is_live, self._is_over = False, True
            reason = answer.error or f"the session is over: {answer.end}"
            raise FrameError("EXECUTION_ERROR", reason, error_class=answer.error_class)
        if answer.number == self._expected:
            self._apply_answer(kind, answer)
            self._expected += 1
        elif answer.number > self._expected:  # another gateway made calls
            await self._load_journals()
        return answer  # a smaller number: an answer of before

    async def _load_journals(self) -> None:
        """Everything from the journals: which environment is the last, what was done in it. Nothing is changed if the log does
        not answer."""
        number = await self._find_last_number()
        journal = Journal()
        if number >= 0:
            journal = await read_session_journal(self._client.bus, self._client.subjects, f"{self.name}-{number}")
        self._number, self._is_over, self.steps, self._resets = number, True, 0, 0
        self._task = journal.claim.task if journal.claim else None
        self._is_live = journal.ended is None and journal.claim is not None
        self._expected = journal.next_number
        for record in journal.records:
            if record.answer.end is None:
                self._apply_answer(record.call.call, record.answer)

    def _apply_answer(self, kind: str, answer: SessionAnswer) -> None:
        if kind == "reset":
            self.tools, self.steps, self._is_over = answer.tools, 0, False
            self._resets += 1
        elif kind == "step":
            self.steps += 1
            self._is_over = answer.terminated or answer.truncated

    async def _find_last_number(self) -> int:
        """The greatest number with a journal, -1 if there is none: those of earlier episodes may have left the log."""
        subjects = self._client.subjects
        prefix = subjects.session(f"{self.name}-")
        found = [name.removeprefix(prefix) for name in await self._client.bus.list_subjects(subjects.session("*"))]
        return max((int(number) for number in found if number.isdigit()), default=-1)


def _task(settings: dict[str, object], seed: int | None) -> Task:
    named = {field: str(settings[key]) for key, field in TASK_KEYS.items() if key in settings}
    config = {name: value for name, value in settings.items() if name not in TASK_KEYS}
    return msgspec.structs.replace(Task(key="openenv", config=config, seed=seed), **named)


def _is_same_task(left: Task, right: Task | None) -> bool:
    """True if two tasks differ in their seeds at most."""
    return right is not None and msgspec.structs.replace(left, seed=None) == msgspec.structs.replace(right, seed=None)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
