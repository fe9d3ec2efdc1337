"""Pydantic AI: its own loop over OpenAI's chat completions."""

import asyncio

from common import ARGUMENTS, COMMAND, PROMPT, look
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.models.openai import OpenAIChatModel


async def main() -> None:
    served = MCPToolset({"mcpServers": {"places": {"command": COMMAND, "args": ARGUMENTS}}})
    agent = Agent(OpenAIChatModel("policy"), tools=[look], toolsets=[served])
    async with agent:
        print((await agent.run(PROMPT)).output)


asyncio.run(main())
