"""The MCP server of the default tasks: ``find_item`` and ``get_field`` over a warehouse in an in-memory SQLite database.

Above it is `McpEnvironment`, below it SQLite. One server per episode, made from the task's seed; the policy sees the
warehouse through the two tools alone, the verifier through read-only `query`.
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from mcp.server import Server, ServerRequestContext
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent, Tool

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.adapters.warehouse.items import FIELDS, TOOLS, Warehouse, draw_warehouse

MAX_ROWS = 1000
"""Most rows that one `query` returns."""

MAX_STEPS = 5_000_000
"""Most steps of SQLite's machine in one `query`, a few tenths of a second: the query of a verifier must not hold up others."""

_STEPS_PER_CHECK = 50_000
_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_LISTING = ListToolsResult(
    tools=[Tool(name=tool.name, description=tool.description, input_schema=tool.parameters) for tool in TOOLS]
)


class ToolFailed(Exception):
    """A call that the warehouse refuses; its text is what the policy reads."""


class WarehouseServer(Server[dict[str, Any]]):
    """The MCP server of one warehouse. `tools_are_fixed`: every instance lists the same tools, so a client may ask once."""

    tools_are_fixed = True

    def __init__(self, warehouse: Warehouse) -> None:
        super().__init__("warehouse", on_list_tools=_list_tools, on_call_tool=self._call_tool)
        self.middleware.clear()  # one tracing span per message costs more than the query that it would measure
        # Opened on one thread, closed by the collector on any: the connection is never used by two at once.
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        _fill(self._database, warehouse)

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[list[Any]]:
        """Rows of a SELECT, at most `MAX_ROWS`; anything else, and what takes too long, raises ``sqlite3.DatabaseError``."""
        steps = iter(range(MAX_STEPS // _STEPS_PER_CHECK))
        self._database.set_progress_handler(lambda: next(steps, None) is None, _STEPS_PER_CHECK)
        with closing(self._database.execute(sql, params)) as cursor:
            return [list(row) for row in cursor.fetchmany(MAX_ROWS)]

    def close(self) -> None:
        """Release the database; repeating is harmless."""
        self._database.close()

    async def _call_tool(self, _: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams) -> CallToolResult:
        try:
            result = self._run_tool(params.name, params.arguments or {})
        except ToolFailed as failure:
            return CallToolResult(content=[TextContent(text=str(failure))], is_error=True)
        return CallToolResult(content=[TextContent(text=json.dumps(result))])

    def _run_tool(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match tool, arguments:
            case "find_item", {"name": str(name)}:
                return self._find_item(name)
            case "get_field", {"id": int(id), "field": str(field)} if not isinstance(id, bool):
                return self._get_field(id, field)
            case (("find_item" | "get_field"), _):
                raise ToolFailed(f"wrong arguments for {tool}")
        raise ToolFailed(f'unknown tool "{tool}"')

    def _find_item(self, name: str) -> dict[str, Any]:
        row = self._database.execute("SELECT id FROM items WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise ToolFailed(f'no item "{name}"')
        return {"id": row[0]}

    def _get_field(self, id: int, field: str) -> dict[str, Any]:
        if field not in FIELDS:
            raise ToolFailed(f'no field "{field}"')
        # SQLite's integers end at 64 bits; a larger id is simply not there.
        row = self._database.execute(f"SELECT {field} FROM items WHERE id = ?", (id,)).fetchone() if abs(id) < 1 << 63 else None
        if row is None:
            raise ToolFailed(f"no item with id {id}")
        return {field: row[0]}


def make_server(seed: int) -> WarehouseServer:
    """The server of the warehouse that `seed` draws."""
    return WarehouseServer(draw_warehouse(seed))


def serve_task(task: Task) -> WarehouseServer:
    """The server for a task of `fleetbus_workers.environment.adapters.warehouse.tasks`; one without a seed has the warehouse
    of its key."""
    return make_server(find_seed(task))


async def _list_tools(_: ServerRequestContext[dict[str, Any]], __: PaginatedRequestParams | None) -> ListToolsResult:
    return _LISTING


def _fill(database: sqlite3.Connection, warehouse: Warehouse) -> None:
    columns = ("id", "name", *FIELDS)
    database.execute(f"CREATE TABLE items ({', '.join(columns)})")
    database.executemany(
        f"INSERT INTO items VALUES ({', '.join('?' * len(columns))})",
        [tuple(getattr(item, column) for column in columns) for item in warehouse.items],
    )
    database.set_authorizer(_permit)


def _permit(action: int, *_: str | None) -> int:
    """Reading only, and of nothing but this database: a verifier's SQL comes from elsewhere."""
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY
