"""Policies that play an episode that is checked: scripted texts, or random calls of the offered tools. Pure."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetbus_schemas import ChatMessage, Task, ToolSpec

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
            call = {"name": tool.name, "arguments": _fill_object(tool.parameters, choose)}
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


def _fill_object(schema: Mapping[str, Any], choose: random.Random) -> dict[str, object]:
    """Arguments: all that are required, and each other one half of the time."""
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    return {name: fill_schema(inner, choose) for name, inner in properties.items() if name in required or choose.random() < 0.5}


def fill_schema(schema: object, choose: random.Random) -> Any:
    """A random value that a JSON schema of a tool's argument allows."""
    if not isinstance(schema, Mapping):
        return ""
    if schema.get("enum"):
        return choose.choice(list(schema["enum"]))
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer":
            return choose.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 100)))
        case "number":
            return round(choose.uniform(float(schema.get("minimum", 0)), float(schema.get("maximum", 100))), 2)
        case "boolean":
            return choose.random() < 0.5
        case "array":
            return [fill_schema(schema.get("items", {}), choose) for _ in range(choose.randint(0, 2))]
        case "object":
            return _fill_object(schema, choose)
        case "null":
            return None
    return choose.choice(("a", "name", "1"))
