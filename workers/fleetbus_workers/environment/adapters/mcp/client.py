"""A connection to an MCP server outside of this process, or to one that keeps tasks of its own, through the SDK's client.

The client is a nest of task groups and has to be entered and left in one task, while an environment is opened and closed under
time limits of their own. So each connection lives in a task of the `ConnectionHost`, which outlives every episode; opening
starts that task, closing asks it to end, and both may be cancelled at any point.
"""

import math
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import IO, Any

import anyio
import structlog
from anyio.abc import TaskGroup
from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED
from pydantic import ValidationError

from fleetbus_schemas import ToolSpec
from fleetbus_workers.environment.adapters.mcp.connection import (
    MAX_TOOL_PAGES,
    ServerGone,
    ToolResult,
    build_timeout_result,
    check_count,
    parse_tool_result,
    parse_tool_spec,
)
from fleetbus_workers.environment.adapters.mcp.stdio_transport import open_stdio
from fleetbus_workers.environment.base import EnvironmentFailed

LIVENESS_SECONDS = 10.0
"""After a call that timed out, a server that answers nothing for so long counts as gone."""

STDERR_BYTES = 500
"""How much of what a server said last on standard error goes into the reason of a failure."""

_log = structlog.get_logger(__name__)

OpenClient = Callable[[Callable[[], None]], AbstractAsyncContextManager[Client]]
"""Opens a client, and calls its argument as soon as opening may be cancelled."""


class ConnectionHost:
    """The tasks in which connections live; those still open when `run` ends are cut then."""

    def __init__(self) -> None:
        self.tasks: TaskGroup | None = None
        self.connections: set[ClientConnection] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as self.tasks:
            try:
                yield
            finally:
                self.tasks = None
                for connection in list(self.connections):
                    connection.abort()


Diagnose = Callable[[MCPError], str]
"""Why an error means that the server is gone; empty if it is only a call that failed."""


def describe_closed_connection(error: MCPError) -> str:
    """The only sign of death that every transport shows."""
    return "died" if error.error.code == CONNECTION_CLOSED else ""


class ClientConnection:
    """One client, in a task of ``host``. A call may be silent for ``call_seconds``; whenever it reports progress they begin
    anew, so a long call that moves on is bounded by the step's limit alone."""

    def __init__(
        self,
        open_client: OpenClient,
        host: ConnectionHost,
        *,
        call_seconds: float = math.inf,
        diagnose: Diagnose = describe_closed_connection,
    ) -> None:
        self._open_client = open_client
        self._host = host
        self._call_seconds = call_seconds
        self._diagnose = diagnose
        self._client: Client | None = None
        self._failure = "it was closed"
        self._kind: type[EnvironmentFailed] = EnvironmentFailed
        # Shielded from the host's cancellation, and cut only once the process is there: asyncio loses track of a process
        # whose start is cancelled half-way.
        self._scope = anyio.CancelScope(shield=True)
        self._spawned = False
        self._ready, self._stop, self._done = anyio.Event(), anyio.Event(), anyio.Event()

    async def open(self) -> None:
        """Connect; raises `EnvironmentFailed` with the end of the server's standard error if that fails."""
        if self._host.tasks is None:
            raise RuntimeError("enter run() of the environment factory before the first episode")
        self._host.connections.add(self)
        self._host.tasks.start_soon(self._run)
        try:
            await self._ready.wait()
        except BaseException:
            self.abort()
            raise
        if self._client is None:
            raise self._kind(f"no connection to the MCP server: {self._failure}")

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._open_client(self._allow_abort) as self._client:
                    self._ready.set()
                    await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - an episode's server must not end the others': the episode learns of it
            self._failure = describe_root_cause(error)
            self._kind = type(error) if isinstance(error, EnvironmentFailed) else EnvironmentFailed
            if self._client is not None:  # otherwise `open` raises it
                _log.warning("mcp connection failed; its episode ends", reason=self._failure)
        finally:
            self._client = None
            self._host.connections.discard(self)
            self._ready.set()
            self._done.set()

    def _allow_abort(self) -> None:
        self._spawned = True
        if self._stop.is_set():
            self._scope.cancel()

    def abort(self) -> None:
        """End the connection without waiting for anything in progress."""
        self._stop.set()
        if self._spawned:
            self._scope.cancel()

    def _require_client(self) -> Client:
        if self._client is None:
            raise ServerGone(f"the MCP server is gone: {self._failure}")
        return self._client

    @property
    def is_open(self) -> bool:
        return self._client is not None and not self._stop.is_set()

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        """All tools, page by page; raises `ServerGone`, or `EnvironmentFailed` with the server's own error."""
        try:
            return await self._list_tools()
        except MCPError as error:
            if reason := self._diagnose(error):
                raise ServerGone(f"the MCP server {reason}") from error
            raise EnvironmentFailed(f"the MCP server does not list its tools: {error.error.message}") from error

    async def _list_tools(self) -> tuple[ToolSpec, ...]:
        tools: list[ToolSpec] = []
        cursor: str | None = None
        for _ in range(MAX_TOOL_PAGES):
            page = await self._require_client().list_tools(cursor=cursor)
            listed = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in check_count(tools, page.tools)]
            tools += map(parse_tool_spec, listed)
            cursor = page.next_cursor
            if cursor is None:
                break
        return tuple(tools)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        with anyio.move_on_after(self._call_seconds) as scope:

            async def extend(progress: float, total: float | None, message: str | None) -> None:
                scope.deadline = anyio.current_time() + self._call_seconds

            return await self._send_call(name, arguments, extend)
        await self._check_alive()
        return build_timeout_result(self._call_seconds)

    async def _send_call(self, name: str, arguments: dict[str, object], on_progress: Any) -> ToolResult:
        try:
            result = await self._require_client().call_tool(name, arguments, progress_callback=on_progress)
        except MCPError as error:
            if reason := self._diagnose(error):
                raise ServerGone(f"the MCP server {reason}") from error
            return ToolResult(content=error.error.message, failed=True)
        except (ValidationError, RuntimeError) as error:
            _log.warning("mcp tool result is invalid; returning an error to the policy", tool=name, reason=str(error))
            return ToolResult(content="the tool gave a result that breaks its own contract", failed=True)
        return parse_tool_result(result.model_dump(by_alias=True, mode="json", exclude_none=True))

    async def _check_alive(self) -> None:
        """Raises `ServerGone` unless the server answers anything at all."""
        with anyio.move_on_after(LIVENESS_SECONDS):
            await self.list_tools()
            return
        raise ServerGone(f"the MCP server answers nothing, {LIVENESS_SECONDS:g} s after a call that timed out")

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")

    async def close(self) -> None:
        """End the connection and wait until it is gone; cancelled, it is cut instead of closed."""
        if self not in self._host.connections:
            return
        self._stop.set()
        try:
            await self._done.wait()
        finally:
            self.abort()


@asynccontextmanager
async def open_command(command: Sequence[str], spawned: Callable[[], None]) -> AsyncIterator[Client]:
    """A client of a server that runs as a child process and talks over its standard input and output."""
    with tempfile.TemporaryFile("w+b") as errors:
        try:
            async with Client(open_stdio(command, errors, spawned), cache=None) as client:
                yield client
        except Exception as error:  # a server may end in any way; its cause is the episode's
            raise EnvironmentFailed(f"{describe_root_cause(error)}{_read_stderr_tail(errors)}") from error


@asynccontextmanager
async def open_server(server: Any, spawned: Callable[[], None]) -> AsyncIterator[Client]:
    """A client of a server object in this process, lifespan included."""
    spawned()
    async with Client(server, cache=None) as client:
        yield client


def describe_root_cause(error: BaseException) -> str:
    """The first cause in a nest of exception groups, in words."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _read_stderr_tail(errors: IO[bytes]) -> str:
    size = errors.seek(0, 2)
    errors.seek(max(0, size - STDERR_BYTES))
    text = errors.read().decode("utf-8", "replace").strip()
    return f" (on standard error: {text})" if text else ""
