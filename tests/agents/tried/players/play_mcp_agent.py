"""mcp-agent: its own loop over OpenAI's chat completions, whose tools are a server's."""

import asyncio

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, MCPServerSettings, MCPSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM

servers = {"places": MCPServerSettings(command=COMMAND, args=ARGUMENTS)}
settings = Settings(
    execution_engine="asyncio",
    logger=LoggerSettings(type="none"),
    mcp=MCPSettings(servers=servers),
    openai=OpenAISettings(api_key=KEY, base_url=URL, default_model="policy"),
)


async def main() -> None:
    async with MCPApp(name="tried", settings=settings).run(), Agent(name="looker", server_names=["places"]) as agent:
        model = await agent.attach_llm(OpenAIAugmentedLLM)
        print(await model.generate_str(PROMPT))


asyncio.run(main())
