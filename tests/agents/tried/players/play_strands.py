"""Strands Agents: its own loop over OpenAI's chat completions, with a server of the Model Context Protocol."""

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL, look
from mcp import StdioServerParameters, stdio_client
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.tools.mcp import MCPClient

model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id="policy")
with MCPClient(lambda: stdio_client(StdioServerParameters(command=COMMAND, args=ARGUMENTS))) as served:
    Agent(model=model, tools=[tool(look), *served.list_tools_sync()])(PROMPT)
