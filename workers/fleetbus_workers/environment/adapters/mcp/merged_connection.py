"""Several MCP servers as one connection: their tools together, each call to the server that has the tool.

Above it is `McpEnvironment`, below it one `Connection` per server, opened and closed at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import anyio
import structlog

from fleetbus_schemas import ToolSpec
from fleetbus_workers.environment.adapters.mcp.connection import Connection, ToolResult
from fleetbus_workers.environment.base import EnvironmentFailed

_log = structlog.get_logger(__name__)


class MergedConnection:
    """``connections`` by the name that errors call them by.

    ``clashes``: two servers with a tool of one name either fail the episode, naming all three, or the first server wins.
    ``optional`` are errors of opening that a server may end with as long as another one opens.
    """

    def __init__(
        self,
        connections: Mapping[str, Connection],
        *,
        clashes: Literal["refuse", "first"] = "refuse",
        optional: tuple[type[EnvironmentFailed], ...] = (),
    ) -> None:
        self._connections = dict(connections)
        self._open = dict(connections)
        self._clashes = clashes
        self._optional = optional
        self._owners: dict[str, str] = {}

    async def open(self) -> None:
        """Raises the first server's error that counts; all of them, if none could be opened."""
        failures = await self._call_each(lambda connection: connection.open())
        for name, error in failures.items():
            if not isinstance(error, self._optional) or len(failures) == len(self._connections):
                raise type(error)("; ".join(dict.fromkeys(map(str, failures.values())))) from error
            _log.debug("mcp endpoint does not exist; continuing without it", endpoint=name)
        self._open = {name: connection for name, connection in self._connections.items() if name not in failures}

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        tools: dict[str, ToolSpec] = {}
        self._owners = {}
        for name, connection in self._open.items():
            for tool in await connection.list_tools():
                if tool.name in self._owners:
                    self._resolve_clash(tool, tools[tool.name], name)
                else:
                    self._owners[tool.name] = name
                    tools[tool.name] = tool
        return tuple(tools.values())

    def _resolve_clash(self, tool: ToolSpec, first: ToolSpec, name: str) -> None:
        owner = self._owners[tool.name]
        if self._clashes == "refuse":
            raise EnvironmentFailed(f"two MCP servers have a tool {tool.name!r}: {owner} and {name}; rename one")
        if tool != first:
            _log.warning("two mcp servers have the same tool; using the first", tool=tool.name, used=owner, ignored=name)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        owner = self._owners.get(name)
        if owner is None:
            return ToolResult(content=f"no server has a tool {name!r}", failed=True)
        return await self._open[owner].call_tool(name, arguments)

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        """Rows from the first server that shows a database."""
        for connection in self._open.values():
            try:
                return await connection.query(sql, params)
            except LookupError:
                continue
        raise LookupError("this environment has no database")

    async def close(self) -> None:
        for name, error in (await self._call_each(lambda connection: connection.close())).items():
            _log.warning("mcp connection close failed; continuing", endpoint=name, reason=str(error))

    async def _call_each(self, call: Callable[[Connection], Awaitable[None]]) -> dict[str, EnvironmentFailed]:
        """Do it to all at the same time; who failed, in the order of the servers."""
        failures: dict[str, EnvironmentFailed] = {}

        async def call_one(name: str, connection: Connection) -> None:
            try:
                await call(connection)
            except EnvironmentFailed as error:
                failures[name] = error

        async with anyio.create_task_group() as group:
            for name, connection in self._connections.items():
                group.start_soon(call_one, name, connection)
        return {name: failures[name] for name in self._connections if name in failures}
