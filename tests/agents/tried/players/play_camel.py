"""CAMEL's ChatAgent: its own loop over OpenAI's chat completions."""

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from common import KEY, PROMPT, URL, look


class Counter(BaseTokenCounter):
    """Its own fetches an encoding from outside."""

    def count_tokens_from_messages(self, messages):
        return len(str(messages)) // 4

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()


model = ModelFactory.create(ModelPlatformType.OPENAI_COMPATIBLE_MODEL, "policy", url=URL, api_key=KEY, token_counter=Counter())
print(ChatAgent("Be brief.", model=model, tools=[FunctionTool(look)]).step(PROMPT).msgs[0].content)
