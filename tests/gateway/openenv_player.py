"""The real OpenEnv clients: `openenv_player.py URL WHAT`, one of the functions. Run by a Python that has `openenv`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


async def play(client: GenericEnvClient) -> dict[str, Any]:
    """One episode of three steps."""
    told = await client.reset(seed=7, prompt="Add to")
    seen = [[told.observation["text"], told.reward, told.done]]
    for text in ("one", "two", "three"):
        told = await client.step({"text": text})
        seen.append([told.observation["text"], told.reward, told.done])
    return {"seen": seen, "steps": (await client.state())["step_count"]}


async def defects(client: GenericEnvClient) -> dict[str, Any]:
    """What its own servers let pass or die of, and whether the session still knows its steps afterwards."""
    told: dict[str, Any] = {"early": await refused(client.step({"text": "early"}))}
    started = await client.reset(seed=1)
    told["metadata"] = started.metadata
    await client.step({"text": "one"})
    told["bad action"] = await refused(client.step({"wrong": 1}))
    await asyncio.sleep(6)  # longer than its servers' idle limit in their own tests: an open session is not idle
    await client.step({"text": "two"})
    told["steps"] = (await client.state())["step_count"]
    told["not a number"] = await refused(client.step({"text": "nan"}))
    return told


async def refused(call: Any) -> str:
    try:
        await call
    except RuntimeError as error:
        return str(error)
    return ""


async def wait(client: GenericEnvClient) -> dict[str, Any]:
    await client.reset()
    print("begun", flush=True)
    await asyncio.sleep(600)
    return {}


async def tools(url: str) -> dict[str, Any]:
    """The client of MCP environments, by HTTP and by socket in turn."""
    async with MCPToolClient(base_url=url) as client:
        await client.reset(seed=3)
        listed = [tool.name for tool in await client.list_tools()]
        told = [await client.call_tool("add", a=2, b=3)]
        stepped = await client.step(CallToolAction(tool_name="add", arguments={"a": 4, "b": 5}))
        told.append(stepped.observation.result["data"])
        try:
            await client.call_tool("nope")
        except RuntimeError as error:
            told.append(str(error))
        return {"listed": listed, "told": told, "reward": stepped.reward, "steps": (await client.state()).step_count}


async def shelf(url: str) -> None:
    """Tools of `tests/support/shelf_server.py`, without a reset of one's own."""
    async with MCPToolClient(base_url=url) as client:
        print([tool.name for tool in await client.list_tools()])
        print(await client.call_tool("say", word="hi"))
        print(await client.call_tool("add", a=2, b=3))
        try:
            await client.call_tool("fail")
        except RuntimeError as error:
            print(error)


async def obey(client: GenericEnvClient) -> dict[str, Any]:
    """Calls from standard input, a line of JSON each, and what each led to; the last one ends it."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, arguments = json.loads(line)
        try:
            told = await getattr(client, name)(**arguments)
            shown = told if isinstance(told, dict) else [told.observation["text"], told.reward, told.done]
        except Exception as error:
            shown = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(shown), flush=True)
    return {}


async def timeouts(url: str) -> dict[str, Any]:
    """A client that waits less than a step takes: first without a name, then under one, with and without a request id."""
    told: dict[str, Any] = {}
    slow = {"text": "slow4", "metadata": {"request_id": "r1"}}
    for kind, address in (("own", url), ("named", f"{url}/sessions/patient")):
        async with GenericEnvClient(base_url=address, message_timeout_s=30) as client:
            await client.reset(seed=1)
            client._message_timeout = 2.0
            try:
                await client.step(slow)
            except TimeoutError:
                told[f"{kind} timed out"] = True
            client._message_timeout = 60.0
            told[f"{kind} again"] = await refused(client.step(slow))
            told[f"{kind} steps"] = (await client.state())["step_count"]
            told[f"{kind} next"] = (await client.reset(seed=2)).observation["text"]
    return told


async def main(url: str, what: str) -> None:
    if what == "shelf":
        return await shelf(url)
    if what in ("tools", "timeouts"):
        print(json.dumps(await {"tools": tools, "timeouts": timeouts}[what](url)))
        return
    async with GenericEnvClient(base_url=url) as client:
        print(json.dumps(await {"play": play, "defects": defects, "wait": wait, "obey": obey}[what](client)))


asyncio.run(main(*sys.argv[1:3]))
