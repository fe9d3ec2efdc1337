"""Haystack's Agent: its own loop over OpenAI's chat completions."""

from typing import Annotated

from common import ARGUMENTS, COMMAND, PROMPT
from common import look as look_at
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack_integrations.tools.mcp import MCPToolset, StdioServerInfo


@tool
def look(at: Annotated[int, "The number of the place"]) -> str:
    """Looks at a place and says what is there."""
    return look_at(at)


served = MCPToolset(StdioServerInfo(command=COMMAND, args=ARGUMENTS), eager_connect=True)
agent = Agent(chat_generator=OpenAIChatGenerator(model="policy"), tools=[look, *served])
print(agent.run(messages=[ChatMessage.from_user(PROMPT)])["messages"][-1].text)
