"""smolagents' CodeAgent: its own loop, in which the policy writes code."""

from common import KEY, PROMPT, URL, look
from smolagents import CodeAgent, OpenAIServerModel, tool

print(CodeAgent([tool(look)], OpenAIServerModel("policy", api_base=URL, api_key=KEY)).run(PROMPT))
