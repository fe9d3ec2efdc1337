"""The OpenHands SDK: its own loop and its terminal."""

import os

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

model = LLM(model="openai/policy", base_url=URL, api_key=SecretStr(KEY))
server = {"places": {"command": COMMAND, "args": ARGUMENTS}}
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name)], mcp_config=server)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(PROMPT)
conversation.run()
