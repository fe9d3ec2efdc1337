"""The default task's MCP server: what it lists, what it answers, what its database permits; and an episode on it."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest
from mcp import Client

from fleetbus_workers.environment.adapters.mcp.connection import DirectConnection, ToolResult
from fleetbus_workers.environment.adapters.warehouse.items import FIELDS, NAMES, TOOLS, draw_warehouse
from fleetbus_workers.environment.adapters.warehouse.server import make_server
from fleetbus_workers.environment.adapters.warehouse.tasks import build_warehouse_task
from fleetbus_workers.environment.isolation.verifier import Verifier
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_and_trio
from tests.support.tool_calls import say, tool_call

SEED = 7
WAREHOUSE = draw_warehouse(SEED)
ITEM = WAREHOUSE.items[0]

anyio_backend = asyncio_and_trio


async def call(tool: str, arguments: dict[str, Any]) -> ToolResult:
    connection = DirectConnection(make_server(SEED), {})
    await connection.open()
    try:
        return await connection.call_tool(tool, arguments)
    finally:
        await connection.close()


async def test_the_tools_over_mcp_are_the_ones_that_the_policy_was_trained_on() -> None:
    async with Client(make_server(SEED), cache=None) as client:
        listed = (await client.list_tools()).tools
    assert [(tool.name, tool.description, tool.input_schema) for tool in listed] == [
        (tool.name, tool.description, tool.parameters) for tool in TOOLS
    ]


async def test_a_direct_connection_lists_and_answers_as_a_real_client_sees_it() -> None:
    connection = DirectConnection(make_server(SEED), {})
    assert await connection.list_tools() == TOOLS
    async with Client(make_server(SEED), mode="legacy", cache=None) as client:
        calls: list[tuple[str, dict[str, Any]]] = [
            ("find_item", {"name": ITEM.name}),
            ("get_field", {"id": ITEM.id, "field": "x"}),
            ("no", {}),
        ]
        for tool, arguments in calls:
            wire = await client.call_tool(tool, arguments)
            direct = await connection.call_tool(tool, arguments)
            assert wire.content[0].type == "text"
            assert (direct.content, direct.failed) == (wire.content[0].text, wire.is_error)
    await connection.close()


async def test_an_item_is_found_and_its_fields_are_read() -> None:
    assert await call("find_item", {"name": ITEM.name}) == ToolResult(content=json.dumps({"id": ITEM.id}))
    for field in FIELDS:
        expected = json.dumps({field: ITEM.field(field)})
        assert await call("get_field", {"id": ITEM.id, "field": field}) == ToolResult(content=expected)


ABSENT = next(name for name in NAMES if name not in {item.name for item in WAREHOUSE.items})


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("find_item", {"name": ABSENT}, f'no item "{ABSENT}"'),
        ("find_item", {"name": 3}, "wrong arguments for find_item"),
        ("find_item", {}, "wrong arguments for find_item"),
        ("get_field", {"id": 5, "field": "price"}, "no item with id 5"),
        ("get_field", {"id": 1 << 70, "field": "price"}, f"no item with id {1 << 70}"),
        ("get_field", {"id": ITEM.id, "field": "weight"}, 'no field "weight"'),
        ("get_field", {"id": ITEM.id, "field": "price; DROP TABLE items"}, 'no field "price; DROP TABLE items"'),
        ("get_field", {"id": str(ITEM.id), "field": "price"}, "wrong arguments for get_field"),
        ("get_field", {"id": True, "field": "price"}, "wrong arguments for get_field"),
        ("buy", {}, 'unknown tool "buy"'),
    ],
)
async def test_what_is_not_there_is_a_tool_error(tool: str, arguments: dict[str, Any], text: str) -> None:
    assert await call(tool, arguments) == ToolResult(content=text, failed=True)


def test_the_verifier_may_read() -> None:
    server = make_server(SEED)
    rows = server.query("SELECT price FROM items WHERE name = ?", [ITEM.name])
    assert rows == [[ITEM.price]]
    assert server.query("SELECT count(*), max(length(name)) FROM items")[0][0] == len(WAREHOUSE.items)
    server.close()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE items SET price = 1",
        "DELETE FROM items",
        "DROP TABLE items",
        "CREATE TABLE x (y)",
        "ATTACH DATABASE '/tmp/fleetbus-attached' AS x",
        "VACUUM INTO '/tmp/fleetbus-attached'",
        "PRAGMA query_only = OFF",
        "SELECT load_extension('x')",
        "BEGIN",
        "nonsense",
    ],
)
def test_the_verifier_may_do_nothing_but_read(sql: str) -> None:
    server = make_server(SEED)
    with pytest.raises(sqlite3.Error):
        server.query(sql)
    assert server.query("SELECT price FROM items WHERE id = ?", [ITEM.id]) == [[ITEM.price]]
    server.close()


def test_an_endless_query_is_cut_and_the_next_one_works() -> None:
    server = make_server(SEED)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        server.query("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n")
    assert len(server.query("SELECT 1 FROM items AS a, items AS b, items AS c, items AS d")) == 1000
    server.close()


@pytest.mark.parametrize(("offset", "reward"), [(0, 1.0), (1, 0.0)])
async def test_an_episode_is_played_and_graded(offset: int, reward: float) -> None:
    verifier = Verifier()
    factory = build_environment_factory("warehouse", verifier=verifier)
    async with verifier.run(), factory.run():
        environment = factory()
        assert environment.replayable
        await environment.open(build_warehouse_task(SEED))
        start = await environment.reset()
        assert [message.role for message in start.messages] == ["system", "user"]
        assert start.messages[1].content == f'Read "{WAREHOUSE.field}" of "{WAREHOUSE.name}".'
        found = await environment.step(say(tool_call("find_item", name=WAREHOUSE.name)))
        item = next(item for item in WAREHOUSE.items if item.name == WAREHOUSE.name)
        assert found.messages[0].content == f'Tool result:\n{{"id": {item.id}}}'
        read = await environment.step(say(tool_call("get_field", id=item.id, field=WAREHOUSE.field), turn=1))
        assert read.messages[0].content == f'Tool result:\n{{"{WAREHOUSE.field}": {WAREHOUSE.answer}}}'
        last = await environment.step(say(f"{WAREHOUSE.answer + offset} <done>", turn=2))
        assert (last.terminated, last.messages) == (True, ())
        verdict = await environment.verify()
        assert verdict.reward == reward, verdict.reason
        await environment.close()
        await environment.close()


async def test_the_same_actions_lead_to_the_same_observations() -> None:
    factory = build_environment_factory("warehouse", verifier=Verifier())
    actions = [say(tool_call("find_item", name=name)) for name in NAMES[:4]] + [say("nothing"), say(tool_call("x"))]
    seen = []
    for _ in range(2):
        environment = factory()
        await environment.open(build_warehouse_task(SEED))
        seen.append([await environment.reset(), *[await environment.step(action) for action in actions]])
        await environment.close()
    assert seen[0] == seen[1]
