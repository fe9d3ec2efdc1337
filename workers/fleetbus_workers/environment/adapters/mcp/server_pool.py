"""MCP servers that outlive an episode: a server with a reset tool is reset instead of being restarted.

Above it is `McpEnvironment`, below it one `ClientConnection` per process. A process goes back into the pool only after an
episode in which every call came to its end; what was cancelled, timed out or died is closed instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import structlog

from fleetbus_schemas import Task, ToolSpec
from fleetbus_workers.environment.adapters.mcp.client import ClientConnection
from fleetbus_workers.environment.adapters.mcp.connection import ToolResult
from fleetbus_workers.environment.base import EnvironmentFailed

log = structlog.get_logger(__name__)

MAX_IDLE = 64
"""Most processes that wait for an episode; a further one is closed when its episode is over."""


class WarmPool:
    """Open connections that wait for an episode, the most recently used taken first."""

    def __init__(self, connect: Callable[[], ClientConnection], *, reset_tool: str) -> None:
        self.connect = connect
        self.reset_tool = reset_tool
        self._idle: list[ClientConnection] = []

    def acquire(self) -> ClientConnection | None:
        """A connection whose server still lives, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def release(self, connection: ClientConnection) -> bool:
        """True if the pool keeps it; otherwise it is to be closed."""
        if not connection.is_open or len(self._idle) >= MAX_IDLE:
            return False
        self._idle.append(connection)
        return True


class PooledConnection:
    """One episode's use of a server out of ``pool``: reset first, whether it is new or not, so that both begin alike.

    The reset tool is called with ``seed`` if it takes one and the task has one. Only the pool sees that tool.
    """

    def __init__(self, pool: WarmPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._connection: ClientConnection | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._is_clean = False

    async def open(self) -> None:
        """Raises `EnvironmentFailed` if a server of its own cannot be reset; one that waited is replaced then."""
        while (connection := self._pool.acquire()) is not None:
            self._connection = connection
            try:
                await self._reset_server(connection)
                return
            except EnvironmentFailed as error:
                log.warning("mcp server reset failed; starting a new one", reason=str(error))
                await connection.close()
        self._connection = connection = self._pool.connect()
        await connection.open()
        await self._reset_server(connection)

    async def _reset_server(self, connection: ClientConnection) -> None:
        tools = {tool.name: tool for tool in await connection.list_tools()}
        reset = tools.pop(self._pool.reset_tool, None)
        if reset is None:
            raise EnvironmentFailed(f"the MCP server has no tool {self._pool.reset_tool!r} to reset it with")
        takes_seed = self._task.seed is not None and "seed" in reset.parameters.get("properties", {})
        result = await connection.call_tool(reset.name, {"seed": self._task.seed} if takes_seed else {})
        if result.failed:
            raise EnvironmentFailed(f"the MCP server could not be reset: {result.content}")
        self._tools = tuple(tools.values())
        self._is_clean = True

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        await anyio.lowlevel.checkpoint()
        return self._tools

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        assert self._connection is not None
        if name == self._pool.reset_tool:
            return ToolResult(content=f"there is no tool {name!r}", failed=True)
        self._is_clean, was_clean = False, self._is_clean
        result = await self._connection.call_tool(name, arguments)
        self._is_clean = was_clean and not result.abandoned
        return result

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("this environment has no database")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not (self._is_clean and self._pool.release(connection)):
            await connection.close()
