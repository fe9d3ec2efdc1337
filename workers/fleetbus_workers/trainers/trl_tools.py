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

MAX_CHARACTERS = 1 << 16
"""So much of its definitions a tool's references may take, as JSON; what more of them name may be any value."""

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
    definitions = _Definitions(tool.parameters.get("$defs") or tool.parameters.get("definitions") or {})
    schemas = {name: _resolve(each, definitions) if isinstance(each, Mapping) else {} for name, each in properties.items()}
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


class _Definitions:
    """The definitions of one tool, given out as far as there is room."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._sizes: dict[str, int] = {}
        self._room = MAX_CHARACTERS

    def take(self, name: str) -> Mapping[str, Any]:
        """A definition; an empty one where there is none, or no room for it."""
        found = self._schemas.get(name)
        if not isinstance(found, Mapping):
            return {}
        if name not in self._sizes:
            self._sizes[name] = len(json.dumps(found))
        if self._sizes[name] > self._room:
            return {}
        self._room -= self._sizes[name]
        return found


def _resolve(schema: Any, definitions: _Definitions, above: tuple[str, ...] = ()) -> Any:
    """The schema without references; one inside what it names may be any value."""
    if isinstance(schema, list):
        return [_resolve(each, definitions, above) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        name = reference.rpartition("/")[2]
        found = definitions.take(name) if name not in above else {}
        return _resolve({**found, **{key: each for key, each in schema.items() if key != "$ref"}}, definitions, (*above, name))
    return {key: _resolve(value, definitions, above) for key, value in schema.items()}
