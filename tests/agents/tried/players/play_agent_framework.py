"""Microsoft's Agent Framework: its own loop over OpenAI's Responses, which is its default."""

import asyncio

from agent_framework import Agent, MCPStdioTool
from agent_framework.openai import OpenAIChatClient
from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL, look


async def main() -> None:
    client = OpenAIChatClient(model="policy", base_url=URL, api_key=KEY)
    async with (
        MCPStdioTool(name="places", command=COMMAND, args=ARGUMENTS) as served,
        Agent(client=client, instructions="Be brief.", tools=[look, served]) as agent,
    ):
        print((await agent.run(PROMPT)).text)


asyncio.run(main())
