"""The OpenAI Agents SDK: its Runner over OpenAI's Responses, streamed."""

import asyncio

from agents import Agent, Runner, function_tool
from agents.mcp import MCPServerStdio
from common import ARGUMENTS, COMMAND, PROMPT, look


async def main() -> None:
    async with MCPServerStdio(params={"command": COMMAND, "args": ARGUMENTS}) as served:
        agent = Agent(name="looker", tools=[function_tool(look)], mcp_servers=[served], model="policy")
        result = Runner.run_streamed(agent, PROMPT)
        async for _ in result.stream_events():
            pass
        print(result.final_output)


asyncio.run(main())
