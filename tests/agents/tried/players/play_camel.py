"""CAMEL's ChatAgent: its own loop over OpenAI's chat completions."""

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from common import KEY, PROMPT, URL, look

model = ModelFactory.create(ModelPlatformType.OPENAI_COMPATIBLE_MODEL, "policy", url=URL, api_key=KEY)
print(ChatAgent("Be brief.", model=model, tools=[FunctionTool(look)]).step(PROMPT).msgs[0].content)
