"""Tools of MCP environments through the OpenEnv gateway: as their server has them, in no words that were made for a policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus_workers.environment.specs import build_environment_factory
from tests.gateway.test_openenv_real_client import PLAYER
from tests.support.openenv_gateway import GatewayFixtures, gateway
from tests.support.openenv_process import openenv_python
from tests.support.shelf_server import NAMES
from tests.support.tool_calls import ConstantGrader


@asynccontextmanager
async def over(spec: str, *, prompt: Any = None, **options: Any) -> AsyncIterator[GatewayFixtures]:
    made = build_environment_factory(spec, verifier=ConstantGrader(), prompt=prompt)
    async with made.run(), gateway(make=made, **options) as here:
        yield here


SHELF = "mcp:tests.support.shelf_server:shelf"


@pytest.mark.parametrize("prompt", [None, "fleet", "compact", "template"])
async def test_tools_are_listed_however_a_policy_would_be_told_of_them(prompt: Any) -> None:
    async with over(SHELF, prompt=prompt) as here, here.socket() as socket:
        told = (await socket.ask("reset", prompt="Look."))["data"]["observation"]
        assert told["messages"] == [{"role": "user", "content": "Look."}], "and nothing of a prompt of ours"
        listed = (await socket.ask("mcp", jsonrpc="2.0", method="tools/list", id=1))["data"]["result"]["tools"]
        assert [tool["name"] for tool in listed] == [*NAMES]
        observed = (await socket.ask("step", type="list_tools"))["data"]["observation"]
        assert [tool["name"] for tool in observed["tools"]] == [*NAMES]


async def test_results_are_what_the_tool_gave() -> None:
    async with over(SHELF) as here, here.socket() as socket:
        await socket.ask("reset")
        step = await socket.ask("step", type="call_tool", tool_name="say", arguments={"word": "hi"})
        told = step["data"]["observation"]
        assert (told["text"], told["result"]["data"], told["error"]) == ("it says hi", "it says hi", None)
        assert told["result"]["content"] == [{"type": "text", "text": "it says hi"}]
        arguments = {"name": "add", "arguments": {"a": 2, "b": 3}}
        result = (await socket.ask("mcp", jsonrpc="2.0", method="tools/call", id=1, params=arguments))["data"]["result"]
        assert (result["data"], result["structured_content"], result["is_error"]) == (5, {"result": 5}, False)


async def test_a_tool_that_fails_is_an_error_by_either_way() -> None:
    async with over(SHELF) as here, here.socket() as socket:
        await socket.ask("reset")
        told = (await socket.ask("step", type="call_tool", tool_name="fail", arguments={}))["data"]["observation"]
        assert told["result"] is None
        assert told["error"] == {"error_type": "execution_error", "message": "the shelf is empty"}
        for name, words in (("fail", "the shelf is empty"), ("error_text", "no such thing")):
            asked = {"name": name, "arguments": {}}
            error = (await socket.ask("mcp", jsonrpc="2.0", method="tools/call", id=1, params=asked))["data"]["error"]
            assert (error["code"], error["message"]) == (-32603, f"Error calling tool '{name}': {words}")
            assert error["data"] == {"reward": 0.0, "done": False}
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 3


async def test_the_warehouse_is_there_without_a_seed() -> None:
    async with over("warehouse") as here:
        session = (await here.rpc("openenv/session/create"))["result"]["session_id"]
        assert (await here.rpc("tools/list", session_id=session))["result"]["tools"]
        called = await here.rpc("tools/call", session_id=session, name="find_item", arguments={"name": "no such thing"})
        assert "no item" in called["error"]["message"]


@pytest.mark.openenv
@pytest.mark.timeout(180)
@pytest.mark.skipif(openenv_python() is None, reason="no Python with openenv: `just test-openenv` makes one")
async def test_the_real_client_of_tools_sees_the_environment_itself() -> None:
    async with over(SHELF, seconds=150) as here:
        played = await anyio.run_process([str(openenv_python()), str(PLAYER), here.url, "shelf"])
        assert played.stdout.decode().split("\n")[:4] == [
            str([*NAMES]),
            "it says hi",
            "5",
            "Tool 'fail' failed: Error calling tool 'fail': the shelf is empty",
        ]
