"""Policies that play an episode that is checked: scripted texts, or random calls of the offered tools. Pure."""

import json
import math
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


def choose_arguments(schema: Mapping[str, Any], choose: random.Random) -> dict[str, Any]:
    """Schemas of arguments by name: of all that are required, and of each other one half of the time."""
    required = _get_list(schema, "required")
    properties = schema.get("properties")
    items = properties.items() if isinstance(properties, Mapping) else ()
    return {name: inner for name, inner in items if name in required or choose.random() < 0.5}


def _fill_object(schema: Mapping[str, Any], choose: random.Random) -> dict[str, object]:
    return {name: fill_schema(inner, choose) for name, inner in choose_arguments(schema, choose).items()}


def fill_schema(schema: object, choose: random.Random) -> Any:
    """A random value that a JSON schema of a tool's argument allows; some text where it is no schema, or only refers to one."""
    if not isinstance(schema, Mapping):
        return ""
    if values := _get_list(schema, "enum"):
        return choose.choice(values)
    for field in ("anyOf", "oneOf"):
        if choices := _get_list(schema, field):
            return fill_schema(_merge(schema, field, choose.choice(choices)), choose)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer":
            lowest, highest = _get_bounds(schema)
            return choose.randint(math.ceil(lowest), max(math.ceil(lowest), math.floor(highest)))
        case "number":
            return round(choose.uniform(*_get_bounds(schema)), 2)
        case "boolean":
            return choose.random() < 0.5
        case "array":
            return [fill_schema(schema.get("items", {}), choose) for _ in range(choose.randint(0, 2))]
        case "object":
            return _fill_object(schema, choose)
        case "null":
            return None
    return choose.choice(("a", "name", "1"))


def _merge(schema: Mapping[str, Any], field: str, choice: Any) -> object:
    """One choice of ``field`` and what stands beside that, which holds for each choice."""
    rest = {name: inner for name, inner in schema.items() if name != field}
    if not isinstance(choice, Mapping):
        return rest
    return rest | dict(choice) | {"required": [*_get_list(rest, "required"), *_get_list(choice, "required")]}


def _get_list(schema: Mapping[str, Any], field: str) -> list[Any]:
    value = schema.get(field)
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _get_bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the greatest number: 0 and 100, or 100 apart, where the schema does not say."""
    lowest, highest = (
        bound if isinstance(bound := schema.get(field), int | float) and math.isfinite(bound) else None
        for field in ("minimum", "maximum")
    )
    if lowest is None:
        lowest = 0 if highest is None or highest >= 0 else highest - 100
    if highest is None:
        highest = 100 if lowest <= 100 else lowest + 100
    return lowest, highest
