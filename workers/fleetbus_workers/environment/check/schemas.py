"""Whether offered tools can be offered: names that every chat format takes, parameters that are a JSON Schema. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetbus_schemas import ToolSpec

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})


def find_tool_problems(tools: Sequence[ToolSpec]) -> list[str]:
    """One line for each thing that is wrong with the tools."""
    problems = [f"two tools are called {name}" for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            problems.append(f"tool {tool.name!r}: a name has 1 to 64 letters, digits, _, . or -")
        problems += [f"tool {tool.name}: {problem}" for problem in _find_schema_problems(tool.parameters, "parameters")]
        if tool.parameters and tool.parameters.get("type") not in (None, "object"):
            problems.append(f"tool {tool.name}: parameters.type is {tool.parameters['type']!r}; it must be 'object'")
    return problems


def _find_schema_problems(schema: Any, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where} must be a JSON Schema, not {type(schema).__name__}"
        return
    kinds = schema.get("type", ())
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            yield f"{where}.type is {kind!r}; JSON Schema has {', '.join(sorted(_TYPES))}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{where}.properties must be an object"
        return
    yield from _find_required_problems(schema.get("required", ()), properties, where)
    for name, inner in properties.items():
        yield from _find_schema_problems(inner, f"{where}.{name}")
    if "items" in schema:
        yield from _find_schema_problems(schema["items"], f"{where}.items")


def _find_required_problems(required: Any, properties: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(required, (str, bytes)) or not isinstance(required, Iterable):
        yield f"{where}.required must be a list of names"
        return
    for name in required:
        if name not in properties:
            yield f"{where}.required names {name!r}, which is no property"
