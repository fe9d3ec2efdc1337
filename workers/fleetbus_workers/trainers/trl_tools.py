"""Tools of an environment as Python methods, whose signatures and docstrings TRL makes the schemas for its model of. Pure."""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, Union

from fleetbus.errors import UserError
from fleetbus_schemas import ToolSpec

Call = Callable[[Any, str, dict[str, Any]], str]
"""The environment, a tool's own name and its arguments: what the model reads of it."""

TAKEN = ("reset", "get_reward", "failure")
"""Names of methods that TRL takes for no tools, beside those with an underscore before them."""

MAX_REFERENCES = 64
"""So many references of a tool are followed; what more of them name may be any value."""

_TYPES: dict[object, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict, "null": type(None),
}  # fmt: skip
_SCALARS = (str, int, float, bool, type(None))
_IN_A_HINT = {"type", "enum", "const", "items", "anyOf", "oneOf", "title", "description"}
_SECTION = re.compile(r"(Args|Returns|Raises|\(choices):", re.IGNORECASE)


def build_methods(tools: Sequence[ToolSpec], call: Call) -> dict[str, FunctionType]:
    """A method per tool, by the name that the model calls it by: the tool's own, unless TRL takes that for no tool. Arguments
    go to ``call`` as the model gave them, those that the tool does not have included: the environment answers them. Raises
    `UserError`."""
    methods: dict[str, FunctionType] = {}
    for tool in tools:
        try:
            method = _build_method(tool, call)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"tool {tool.name!r} has a schema that cannot be read: {type(error).__name__}: {error}") from error
        if method.__name__ in methods:
            raise UserError(f"two tools are called {method.__name__!r} here, one of them is {tool.name!r}: rename one")
        methods[method.__name__] = method
    return methods


def _build_method(tool: ToolSpec, call: Call) -> FunctionType:
    properties, required = tool.parameters.get("properties") or {}, tool.parameters.get("required") or ()
    definitions = tool.parameters.get("$defs") or tool.parameters.get("definitions") or {}
    room = [MAX_REFERENCES]
    schemas = {
        name: _resolve(each, definitions, room) if isinstance(each, Mapping) else {} for name, each in properties.items()
    }
    own_names = {_name_argument(name): name for name in schemas}
    if len(own_names) < len(schemas):
        raise ValueError(f"two of {sorted(schemas)} would have one name as Python's arguments")
    hints = {name: build_hint(schemas[own]) for name, own in own_names.items()}

    def method(self: Any, /, **arguments: Any) -> str:
        return call(self, tool.name, {own_names.get(name, name): value for name, value in arguments.items()})

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[name],
            default=inspect.Parameter.empty if own in required else schemas[own].get("default"),
        )
        for name, own in own_names.items()
    ]
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = inspect.Signature([receiver, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = hints | {"return": str}
    method.__name__ = method.__qualname__ = f"tool_{tool.name}" if tool.name in TAKEN or tool.name[:1] == "_" else tool.name
    lines = [f"    {name}: {_describe(name, schemas[own])}" for name, own in own_names.items()]
    said = _SECTION.sub(r"\1 -", inspect.cleandoc(tool.description)).strip() or f"Call {tool.name}."
    method.__doc__ = "\n".join([said, *(["", "Args:", *lines] if lines else [])])
    assert isinstance(method, FunctionType)
    return method


def build_hint(schema: Mapping[str, Any]) -> Any:
    """The type hint that says as much of a JSON Schema as a hint can; `Any` where it says nothing."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(type(value) in _SCALARS for value in values):
        return Literal[tuple(values)]
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        hints = [Any if each is True else build_hint(each) for each in alternatives]
        return Any if Any in hints else Union[tuple(hints)]  # noqa: UP007 - at once: one by one takes the cube of their number
    match schema.get("type"):
        case list(kinds) if kinds:
            return Union[tuple(build_hint({**schema, "type": kind}) for kind in dict.fromkeys(map(str, kinds)))]  # noqa: UP007
        case "array" if isinstance(schema.get("items"), Mapping):
            return list[build_hint(schema["items"])]  # type: ignore[misc]
        case str(kind):
            return _TYPES.get(kind, Any)
    return Any


def _describe(name: str, schema: Mapping[str, Any]) -> str:
    """One line, with the whole schema where a hint loses something of it: bounds, fields of an object, a default."""
    said = " ".join(str(schema.get("description") or schema.get("title") or name).split())
    if not _fits_hint(schema):
        whole = {key: value for key, value in schema.items() if key not in ("description", "title")}
        said = f"{said} JSON Schema: {json.dumps(whole)}"
    return _SECTION.sub(r"\1 -", said)


def _fits_hint(schema: Mapping[str, Any]) -> bool:
    parts = [each for each in schema.get("anyOf") or schema.get("oneOf") or () if each is not True]
    parts += [schema["items"]] if isinstance(schema.get("items"), Mapping) else []
    said = {key for key in schema if not (key == "default" and schema[key] is None)}
    return said <= _IN_A_HINT and all(map(_fits_hint, parts))


def _name_argument(name: str) -> str:
    """The name itself, or the nearest that Python takes for one."""
    plain = re.sub(r"\W", "_", name)
    plain = f"_{plain}" if plain[:1].isdigit() or not plain else plain
    return f"{plain}_" if keyword.iskeyword(plain) or plain == "self" else plain


def _resolve(schema: Any, definitions: Mapping[str, Any], room: list[int], above: tuple[str, ...] = ()) -> Any:
    """The schema without references; one inside what it names may be any value."""
    if isinstance(schema, list):
        return [_resolve(each, definitions, room, above) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        name = reference.rpartition("/")[2]
        found = definitions.get(name) if name not in above and room[0] > 0 else {}
        room[0], above = room[0] - 1, (*above, name)
        schema = {
            **(found if isinstance(found, Mapping) else {}),
            **{key: value for key, value in schema.items() if key != "$ref"},
        }
        return _resolve(schema, definitions, room, above)
    return {key: _resolve(value, definitions, room, above) for key, value in schema.items()}
