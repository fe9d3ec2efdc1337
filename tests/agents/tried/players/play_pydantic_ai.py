"""Pydantic AI: its own loop over OpenAI's chat completions, streamed."""

import asyncio

from common import ARGUMENTS, COMMAND, PROMPT, look
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPServerStdio
from pydantic_ai.models.openai import OpenAIChatModel


async def main() -> None:
    agent = Agent(OpenAIChatModel("policy"), tools=[look], toolsets=[MCPServerStdio(COMMAND, args=ARGUMENTS)])
    async with agent, agent.run_stream(PROMPT) as result:
        print(await result.get_output())


asyncio.run(main())
