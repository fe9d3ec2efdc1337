"""Policies that play an episode that is checked: scripted texts, or random calls of the offered tools. Pure."""

import json
import random
import re
from collections.abc import Callable, Sequence

from fleetbus_schemas import ChatMessage, Task, ToolSpec
from fleetbus_workers.environment.check.schema_values import fill_schema

Policy = Callable[[Sequence[ChatMessage], Sequence[ToolSpec]], str]
"""The next action's text, for all messages so far (those of the policy included) and the offered tools."""

NO_OPERATION = "no-op"
ORACLE = "oracle"

_WORD = re.compile(r"\w+")


def build_scripted_policy(texts: Sequence[str]) -> Policy:
    """Says these texts in turn, then the last one again; without any it says nothing."""
    left = list(texts) or [""]
    return lambda messages, tools: left.pop(0) if len(left) > 1 else left[0]


def build_random_policy(seed: int) -> Policy:
    """Calls a random tool with random arguments of its schema; without tools it says a random word of what it was shown."""
    choose = random.Random(seed)

    def act(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
        if tools:
            tool = choose.choice(list(tools))
            call = {"name": tool.name, "arguments": fill_schema({**tool.parameters, "type": "object"}, choose)}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        words = [word for message in messages for word in _WORD.findall(read_text(message))]
        said: str = choose.choice([*words, "1"])
        return said

    return act


def find_oracle(task: Task) -> Sequence[str] | None:
    """The actions that solve a task, if its config has them as ``oracle``: a text, or a list of texts."""
    oracle = task.config.get(ORACLE)
    if isinstance(oracle, str):
        return [oracle]
    return oracle if isinstance(oracle, list) and oracle and all(isinstance(text, str) for text in oracle) else None


def read_text(message: ChatMessage) -> str:
    """The text of a message, without its images."""
    content = message.content
    return content if isinstance(content, str) else " ".join(getattr(part, "text", "") for part in content)
