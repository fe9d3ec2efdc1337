"""Random values that a JSON schema of a tool's arguments allows. Pure.

Only so much of JSON Schema is read as tools describe their arguments with: types, choices, bounds, and what refers to another
part of the schema or is put together from several. A schema that refers to itself ends after `MOST_DEPTH` levels.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

MOST_DEPTH = 4
"""Levels with optional arguments and entries of lists; below they are left out."""
MOST_LEVELS, MOST_VALUES = 30, 10_000
"""Beyond, a value that a schema requires of itself for ever is some text."""
MOST_REFERENCES = 50
"""One after the other, and parts of one schema."""

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def choose_arguments(schema: Mapping[str, Any], choose: random.Random) -> dict[str, Any]:
    """Schemas of a tool's arguments by name, settled: of all that are required, and of each other one half of the time."""
    return {name: settle(inner, schema) for name, inner in _choose_properties(settle(schema, schema), choose, 0).items()}


def fill_schema(schema: object, choose: random.Random, root: object = None) -> Any:
    """A random value that a schema allows; some text where it is no schema. ``root``: what its references are looked up in, if
    that is not itself."""
    return _Values(choose, schema if root is None else root).fill(schema, 0)


class _Values:
    """Values of the parts of one schema."""

    def __init__(self, choose: random.Random, root: object) -> None:
        self._choose = choose
        self._root = root
        self._left = MOST_VALUES

    def fill(self, schema: object, depth: int) -> Any:
        self._left -= 1
        schema, choose = settle(schema, self._root), self._choose
        if not isinstance(schema, Mapping) or depth > MOST_LEVELS or self._left < 0:
            return ""
        if values := _get_list(schema, "enum"):
            return choose.choice(values)
        for field in ("anyOf", "oneOf"):
            if choices := _get_list(schema, field):
                return self.fill(_merge(_without(schema, field), choose.choice(choices)), depth + 1)
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match kind[0] if isinstance(kind, list) and kind else kind:
            case "integer":
                return _choose_integer(schema, choose)
            case "number":
                return _choose_number(schema, choose)
            case "boolean":
                return choose.random() < 0.5
            case "array":
                count = choose.randint(0, 2) if depth < MOST_DEPTH else 0
                return [self.fill(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "object":
                chosen = _choose_properties(schema, choose, depth)
                return {name: self.fill(inner, depth + 1) for name, inner in chosen.items()}
            case "null":
                return None
        return choose.choice(("a", "name", "1"))


def settle(schema: Any, root: object) -> Any:
    """A schema with what its ``$ref`` and ``allOf`` say, which are gone: what they do not say stays as it is."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(reference := schema.get("$ref"), str):
            schema = _merge(_look_up(reference, root), _without(schema, "$ref"))
        elif parts := _get_list(schema, "allOf"):
            rest = _without(schema, "allOf")
            schema = _merge(rest | {"allOf": parts[1:]} if parts[1:] else rest, parts[0])
        else:
            return schema
    return {}


def _look_up(reference: str, root: object) -> object:
    """The part of ``root`` that a reference of the form ``#/$defs/NAME`` names; anything, where it names none."""
    found = root
    for token in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#/") else ():
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        else:
            found = found[int(name)] if isinstance(found, list) and name.isdecimal() and int(name) < len(found) else None
    return found if reference == "#" or reference.startswith("#/") else None


def _merge(left: object, right: object) -> Any:
    """A schema of the values that both allow, as far as both are one."""
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return left if isinstance(left, Mapping) else right if isinstance(right, Mapping) else {}
    merged: dict[str, Any] = {**left, **right, "required": [*_get_list(left, "required"), *_get_list(right, "required")]}
    both = left.keys() & right.keys()
    merged |= {each: _narrow(left[each], right[each], max) for each in both & set(_LOWER)}
    merged |= {each: _narrow(left[each], right[each], min) for each in both & set(_UPPER)}
    if "enum" in both:
        merged["enum"] = [each for each in _get_list(left, "enum") if each in _get_list(right, "enum")]
    for field in {"allOf", "$ref"} & both:
        merged["allOf"] = [*_get_list(merged, "allOf"), {field: left[field]}]
    inner = [each["properties"] for each in (left, right) if isinstance(each.get("properties"), Mapping)]
    if len(inner) == 2:
        again = {name: {"allOf": [inner[0][name], inner[1][name]]} for name in inner[0].keys() & inner[1].keys()}
        merged["properties"] = {**inner[0], **inner[1], **again}
    return merged


def _without(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {name: inner for name, inner in schema.items() if name != field}


def _choose_properties(schema: object, choose: random.Random, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    required, properties = _get_list(schema, "required"), schema.get("properties")
    items = properties.items() if isinstance(properties, Mapping) else ()
    return {name: inner for name, inner in items if name in required or (depth < MOST_DEPTH and choose.random() < 0.5)}


def _get_list(schema: Mapping[str, Any], field: str) -> list[Any]:
    value = schema.get(field)
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _choose_integer(schema: Mapping[str, Any], choose: random.Random) -> int:
    lowest, highest, above, below = _get_bounds(schema)
    first = math.floor(lowest) + 1 if above else math.ceil(lowest)
    last = math.ceil(highest) - 1 if below else math.floor(highest)
    return choose.randint(first, max(first, last))


def _choose_number(schema: Mapping[str, Any], choose: random.Random) -> float:
    """With two digits, if such a number is within the bounds."""
    lowest, highest, above, below = _get_bounds(schema)
    drawn = choose.uniform(lowest, highest)
    for number in (round(drawn, 2), drawn):
        if (lowest < number or (number == lowest and not above)) and (number < highest or (number == highest and not below)):
            return number
    return (lowest + highest) / 2


def _get_bounds(schema: Mapping[str, Any]) -> tuple[float, float, bool, bool]:
    """The least and the greatest number: 0 and 100, or 100 apart, where the schema does not say; and if these are left out."""
    (lowest, above), (highest, below) = _read_bounds(schema, _LOWER, max), _read_bounds(schema, _UPPER, min)
    if lowest is None:
        lowest = 0 if highest is None or highest > 0 or (highest == 0 and not below) else highest - 100
    if highest is None:
        highest = 100 if lowest < 100 or (lowest == 100 and not above) else lowest + 100
    return lowest, highest, above, below


def _read_bounds(
    schema: Mapping[str, Any], fields: tuple[str, str], narrower: Callable[[float, float], float]
) -> tuple[float | None, bool]:
    """The narrower of a bound and one that is left out, and if that is; true leaves out the bound itself, in old schemas."""
    bound, left_out = (_read_number(schema.get(field)) for field in fields)
    if left_out is None or (bound is not None and narrower(bound, left_out) == bound != left_out):
        return bound, schema.get(fields[1]) is True
    return left_out, True


def _read_number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _narrow(left: object, right: object, narrower: Callable[[float, float], float]) -> object:
    """The bound that holds where both do."""
    numbers = [number for value in (left, right) if (number := _read_number(value)) is not None]
    return narrower(numbers[0], numbers[-1]) if numbers else left is True or right is True
