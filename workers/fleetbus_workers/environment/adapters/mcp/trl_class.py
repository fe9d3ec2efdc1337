"""A class for TRL's ``environment_factory`` as an environment: its public methods are tools, ``get_reward`` the verdict.

As TRL calls it: made without arguments, ``reset`` with the prompt and the columns of its row, here the task's config. Each
episode has an object of its own; calls that are no coroutine functions run in threads, one after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio

from fleetbus.errors import UserError
from fleetbus_schemas import Task, ToolSpec
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.call_threads import CallThreads, SerialCalls
from fleetbus_workers.environment.adapters.mcp.connection import Connection, ToolResult, build_timeout_result
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, FailedVerdict, Verdict

CALLS = ("reset", "get_reward")
"""The calls of TRL's that are no tools."""

MAX_THREADS = 1024
"""Of all these environments together, one each; those of calls that were given up are counted apart."""


def build_from_trl_class(context: AdapterContext, kind: type) -> Factory:
    """Environments of such a class. Raises `UserError` if transformers is missing, or makes no schema of a method."""
    tools = _list_tools(context.spec, kind)
    threads = CallThreads(anyio.CapacityLimiter(MAX_THREADS))

    def connect(task: Task) -> Connection:
        return TrlConnection(kind, tools, task, call_seconds=context.call_seconds, threads=threads)

    arguments = context.mcp_arguments("template") | {"parallel_calls": 1}
    return Factory(partial(TrlClassEnvironment, connect, replayable=bool(getattr(kind, "replayable", False)), **arguments))


class TrlConnection:
    """An object of the class as an episode's connection. A call longer than ``call_seconds`` is given up; it runs on in its
    thread, and the next one waits for it."""

    def __init__(
        self,
        kind: Callable[[], Any],
        tools: Sequence[ToolSpec],
        task: Task,
        *,
        call_seconds: float,
        threads: CallThreads,
    ) -> None:
        self._kind, self._tools, self._task, self._call_seconds = kind, tuple(tools), task, call_seconds
        self._calls = SerialCalls(threads, kind)
        self._object: Any = None

    async def open(self) -> None:
        self._object = await self._run(self._kind, "__init__")

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        await anyio.lowlevel.checkpoint()
        return self._tools

    async def begin(self) -> str:
        """Reset it, and return what it says. Raises as it does, and `EnvironmentFailed` for an answer that is no text."""
        prompt = [{"role": "user", "content": self._task.prompt}]
        said = await self._run(partial(self._object.reset, **({"prompt": prompt} | self._task.config)), "reset")
        if said is not None and not isinstance(said, str):
            raise EnvironmentFailed(f"reset returned {type(said).__name__}, not a text or None: images are not for it")
        return said or ""

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        """An exception is what the policy reads, as from TRL."""
        with anyio.move_on_after(self._call_seconds):
            try:
                return ToolResult(content=str(await self._run(partial(getattr(self._object, name), **arguments), name)))
            except Exception as error:  # noqa: BLE001 - a user's tool may raise anything
                return ToolResult(content=str({"error": str(error)}), failed=True)
        return build_timeout_result(self._call_seconds)

    async def grade(self) -> Verdict:
        try:
            reward = await self._run(self._object.get_reward, "get_reward")
        except Exception as error:  # noqa: BLE001 - a user's reward may raise anything
            return FailedVerdict(reward=None, reason=f"get_reward raised {type(error).__name__}: {error}")
        return Verdict(reward=None, reason="get_reward returned None") if reward is None else Verdict(reward=float(reward))

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")

    async def close(self) -> None:
        """TRL has no call for it."""
        self._object = None
        await anyio.lowlevel.checkpoint()

    async def _run(self, function: Callable[[], Any], name: str) -> Any:
        if inspect.iscoroutinefunction(function.func if isinstance(function, partial) else function):
            return await function()
        return await self._calls.run(function, name)


class TrlClassEnvironment(McpEnvironment):
    """One episode: what ``reset`` says follows the task's prompt, and ``get_reward`` is the whole verdict."""

    async def _build_prompt(self, task: Task) -> str:
        assert isinstance(self._connection, TrlConnection)
        return task.prompt + await self._connection.begin()

    async def verify(self) -> Verdict:
        assert isinstance(self._connection, TrlConnection)
        return await self._connection.grade()


def _list_tools(spec: str, kind: type) -> tuple[ToolSpec, ...]:
    """The tools that TRL would tell its model of, by the same schemas."""
    try:
        from transformers.utils import get_json_schema
    except ImportError as error:
        raise UserError(f"environment {spec!r} is a class for TRL, whose tools need transformers: {error}") from error
    tools = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in CALLS:
            continue
        try:
            said = get_json_schema(method)["function"]
        except Exception as error:
            raise UserError(f"environment {spec!r}: its method {name} is no tool: {error}") from error
        tools.append(ToolSpec(name, said["description"], said["parameters"]))
    if not tools:
        raise UserError(f"environment {spec!r} is a class for TRL and has no public method, which would be a tool")
    return tuple(tools)
