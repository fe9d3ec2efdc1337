"""Agno's Agent: its own loop over an address that speaks OpenAI's chat completions."""

import asyncio
import shlex

from agno.agent import Agent
from agno.models.openai import OpenAILike
from agno.tools.mcp import MCPTools
from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL, look


async def main() -> None:
    async with MCPTools(command=shlex.join([COMMAND, *ARGUMENTS])) as served:
        agent = Agent(model=OpenAILike(id="policy", base_url=URL, api_key=KEY), tools=[look, served], telemetry=False)
        print((await agent.arun(PROMPT)).content)


asyncio.run(main())
