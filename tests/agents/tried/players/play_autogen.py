"""AutoGen's AssistantAgent: its own loop over OpenAI's chat completions, with a workbench of the Model Context Protocol."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import StdioServerParams, mcp_server_tools
from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL, look


async def main() -> None:
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="policy", base_url=URL, api_key=KEY, model_info=info)
    served = await mcp_server_tools(StdioServerParams(command=COMMAND, args=ARGUMENTS))
    agent = AssistantAgent("looker", client, tools=[look, *served], max_tool_iterations=10)
    print((await agent.run(task=PROMPT)).messages[-1].to_text())


asyncio.run(main())
