"""Agents of the warehouse that a gateway gives their episodes to: SDKs' own loops, unmodified, over the warehouse's MCP server.

``python gateway_clients.py NAME URL SESSIONS`` plays so many sessions at a time until it is ended. NAME is ``langgraph`` (its
prebuilt agent, Chat Completions), ``openai_agents`` (the Runner of the OpenAI Agents SDK, Responses), ``anthropic`` (the tool
runner of Anthropic's SDK, Messages) or ``google_genai`` (Gemini, functions called by Google's SDK). A right answer is worth 1.
"""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from typing import Any

import httpx
from mcp import Client

from fleetbus_workers.environment.adapters.warehouse.items import draw_warehouse
from fleetbus_workers.environment.adapters.warehouse.server import WarehouseServer

MAX_TURNS = 5
CALL_SECONDS = 300.0
RETRIES = 8
"""Of an SDK, for one call: with its pauses that covers a gateway that is started again."""


@cache
def connect(sdk: Any, url: str) -> Any:
    """An SDK's client: one, with its connections, for all sessions."""
    return sdk(base_url=url, api_key="none", max_retries=RETRIES, timeout=CALL_SECONDS)


async def openai_agents(session: dict[str, Any], tools: Client) -> str:
    from agents import Agent, AgentsException, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServer
    from openai import AsyncOpenAI

    class Warehouse(MCPServer):
        """The SDK's view of the server, which a session of the MCP SDK is connected to."""

        name = "warehouse"
        cached_tools = None

        async def connect(self) -> None: ...
        async def cleanup(self) -> None: ...
        async def list_prompts(self) -> Any: ...
        async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...
        async def list_tools(self, run_context: Any = None, agent: Any = None) -> Any:
            return (await tools.list_tools()).tools

        async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
            return await tools.call_tool(tool_name, arguments or {})

    set_tracing_disabled(True)
    client = connect(AsyncOpenAI, session["openai_base_url"]).with_options(api_key=session["key"])
    model = OpenAIResponsesModel("policy", openai_client=client)
    agent = Agent(name="reader", model=model, mcp_servers=[Warehouse()])
    try:
        return str((await Runner.run(agent, session["task"]["prompt"], max_turns=MAX_TURNS)).final_output)
    except AgentsException:  # an unknown tool, too many turns: the policy's doing
        return ""


async def anthropic(session: dict[str, Any], tools: Client) -> str:
    from anthropic import AsyncAnthropic
    from anthropic.lib.tools.mcp import async_mcp_tool

    client = connect(AsyncAnthropic, session["anthropic_base_url"]).with_options(api_key=session["key"])
    runner = client.beta.messages.tool_runner(
        model="policy",
        max_tokens=64,
        max_iterations=MAX_TURNS,
        messages=[{"role": "user", "content": session["task"]["prompt"]}],
        tools=[async_mcp_tool(tool, tools.session) for tool in (await tools.list_tools()).tools],
    )
    message = await runner.until_done()
    return "".join(block.text for block in message.content if block.type == "text")


async def langgraph(session: dict[str, Any], tools: Client) -> str:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.prebuilt import create_react_agent

    def build_tool(tool: Any) -> StructuredTool:
        async def call(**arguments: Any) -> str:
            return await call_tool(tools, tool.name, **arguments)

        return StructuredTool(name=tool.name, description=tool.description, args_schema=tool.input_schema, coroutine=call)

    functions = [build_tool(tool) for tool in (await tools.list_tools()).tools]
    model = ChatOpenAI(
        model="policy",
        base_url=session["openai_base_url"],
        api_key=session["key"],
        max_retries=RETRIES,
        timeout=CALL_SECONDS,
    )
    steps = {"recursion_limit": 2 * MAX_TURNS}  # a turn of the model and one of its tools
    try:
        state = await create_react_agent(model, functions).ainvoke({"messages": [("user", session["task"]["prompt"])]}, steps)
    except GraphRecursionError:  # too many turns: the policy's doing
        return ""
    return str(state["messages"][-1].content)


async def google_genai(session: dict[str, Any], tools: Client) -> str:
    from google.genai import Client as Gemini
    from google.genai import types

    async def find_item(name: str) -> str:
        """Find the id of an item."""
        return await call_tool(tools, "find_item", name=name)

    async def get_field(id: int, field: str) -> str:
        """Read a field of an item."""
        return await call_tool(tools, "get_field", id=id, field=field)

    # The SDK takes an MCP session too, and then fails: it copies its settings, and this session cannot be copied.
    calls = types.AutomaticFunctionCallingConfig(maximum_remote_calls=MAX_TURNS)
    settings = types.GenerateContentConfig(tools=[find_item, get_field], automatic_function_calling=calls)
    retries, milliseconds = types.HttpRetryOptions(attempts=RETRIES), int(CALL_SECONDS * 1000)
    http = types.HttpOptions(base_url=session["gemini_base_url"], timeout=milliseconds, retry_options=retries)
    async with Gemini(api_key=session["key"], http_options=http).aio as client:
        answer = await client.chats.create(model="policy", config=settings).send_message(session["task"]["prompt"])
    return answer.text or ""


async def call_tool(tools: Client, tool_name: str, /, **arguments: Any) -> str:
    result = await tools.call_tool(tool_name, arguments)
    return "".join(part.text for part in result.content if part.type == "text")


AGENTS = {agent.__name__: agent for agent in (langgraph, openai_agents, anthropic, google_genai)}


async def play(name: str, session: dict[str, Any], http: httpx.AsyncClient) -> None:
    """One session, to its reward; what fails outside of the policy is no reward."""
    warehouse = draw_warehouse(session["task"]["seed"])
    reward: dict[str, Any]
    try:
        async with Client(WarehouseServer(warehouse)) as tools:
            answer = await AGENTS[name](session, tools)
        reward = {"reward": float(answer.partition("<done>")[0].strip() == str(warehouse.answer))}
    except Exception as error:
        print(f"{session['id']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        reward = {"reward": None, "reason": f"{type(error).__name__}: {error}"[:500]}
    await http.post(f"{session['url']}/reward", json=reward, headers={"Authorization": f"Bearer {session['reward_key']}"})


async def play_in_turn(name: str, url: str, http: httpx.AsyncClient) -> None:
    while True:
        try:
            answer = await http.get(f"{url}/sessions/next", params={"wait": 30})
            if answer.status_code == 200:
                await play(name, answer.json(), http)
        except httpx.HTTPError:
            await asyncio.sleep(0.5)


async def main() -> None:
    name, url, sessions = sys.argv[1:]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=CALL_SECONDS, limits=limits) as http:
        await asyncio.gather(*(play_in_turn(name, url, http) for _ in range(int(sessions))))


if __name__ == "__main__":
    asyncio.run(main())
