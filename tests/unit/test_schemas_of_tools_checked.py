"""A check of tools whose schemas ask for numbers anywhere, or are no JSON Schema at all."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fleetbus_schemas import ChatMessage, ToolSpec
from fleetbus_workers.environment.check.episode import find_tool_problems
from fleetbus_workers.environment.check.policies import build_random_policy
from fleetbus_workers.environment.check.schema_values import MOST_VALUES, fill_schema
from fleetbus_workers.starter.guessing_player import build_guessing_player

ASKED = (ChatMessage(role="user", content="Look for it."),)


@pytest.mark.parametrize(
    ("schema", "lowest", "highest"),
    [
        ({"type": "integer", "minimum": 1900}, 1900, 2000),
        ({"type": "integer", "maximum": -5}, -105, -5),
        ({"type": "number", "minimum": 1000}, 1000, 1100),
        ({"type": "number", "minimum": None}, 0, 100),
        ({"type": "integer", "minimum": 0.5, "maximum": 1.5}, 1, 1),
        ({"type": "integer", "exclusiveMinimum": 5, "maximum": 6}, 6, 6),
        ({"type": "integer", "minimum": -1, "exclusiveMaximum": 0}, -1, -1),
        ({"type": "integer", "minimum": 7, "exclusiveMinimum": 5, "maximum": 7}, 7, 7),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True, "maximum": 6}, 6, 6),
        ({"type": "integer", "exclusiveMinimum": 100}, 101, 200),
        ({"type": "integer", "exclusiveMaximum": 0}, -100, -1),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, 1e-12, 0.001),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"minimum": 1, "maximum": 9}, {"maximum": 3}]}, 3, 3),
        ({"$ref": "#/$defs/Few", "$defs": {"Few": {"type": "integer", "minimum": 2, "maximum": 2}}}, 2, 2),
    ],
)
def test_random_numbers_are_within_the_bounds_of_their_schema(schema: dict[str, Any], lowest: float, highest: float) -> None:
    values = [fill_schema(schema, random.Random(seed)) for seed in range(50)]
    assert all(lowest <= value <= highest for value in values), values


def test_an_optional_argument_gets_a_value_of_one_of_its_types() -> None:
    schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    values = {type(fill_schema(schema, random.Random(seed))) for seed in range(50)}
    assert values == {int, type(None)}


@pytest.mark.parametrize("field", ["anyOf", "oneOf"])
def test_what_stands_beside_choices_holds_for_each_of_them(field: str) -> None:
    properties = {"name": {"const": "a"}, "id": {"const": 1}, "kind": {"const": "b"}}
    choices = [{"required": ["name"]}, {"required": ["id"]}]
    schema = {"type": "object", "properties": properties, "required": ["kind"], field: choices}
    values = [fill_schema(schema, random.Random(seed)) for seed in range(50)]
    assert all("kind" in value and {"name", "id"} & set(value) for value in values), values
    bounded = {"type": "integer", field: [{"minimum": 150}, {"maximum": -5}, True]}
    assert all(isinstance(fill_schema(bounded, random.Random(seed)), int) for seed in range(50))


@pytest.mark.parametrize("root", ["$defs", "definitions"])
def test_what_a_schema_refers_to_is_called_for(root: str) -> None:
    """As a library writes a class with a field of another class, and one of its own kind."""
    colour = {"enum": ["red", "blue"], "type": "string"}
    place = {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "maximum": 3},
            "next": {"anyOf": [{"$ref": f"#/{root}/Place"}, {"type": "null"}]},
        },
        "required": ["x", "next"],
    }
    parameters = {
        "properties": {"colour": {"$ref": f"#/{root}/Colour"}, "at": {"allOf": [{"$ref": f"#/{root}/Place"}], "title": "At"}},
        "required": ["colour", "at"],
        root: {"Colour": colour, "Place": place},
    }
    tool = ToolSpec(name="look", description="", parameters=parameters)
    for seed in range(50):
        calls = [build(seed)(ASKED, (tool,)) for build in (build_random_policy, build_guessing_player)]
        for call in calls:
            arguments = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]
            assert arguments["colour"] in ("red", "blue"), call
            at = arguments["at"]
            while at is not None:
                assert at["x"] <= 3, call
                at = at["next"]


def test_parts_of_a_schema_that_name_the_same_argument_hold_together() -> None:
    parts = [
        {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
        {"properties": {"n": {"minimum": 50, "maximum": 51}, "m": {"const": 1}}, "required": ["m"]},
    ]
    values = [fill_schema({"type": "object", "allOf": parts}, random.Random(seed)) for seed in range(20)]
    assert all(value["n"] in (50, 51) and value["m"] == 1 for value in values), values


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://elsewhere/schema"},
        {"$ref": 3},
        {"allOf": None},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {each: {"$ref": "#"} for each in "abc"}, "required": list("abc")},
    ],
)
def test_a_schema_that_leads_nowhere_or_to_itself_has_some_value(schema: dict[str, Any]) -> None:
    value = fill_schema(schema, random.Random(1))
    assert len(json.dumps(value)) < 20 * MOST_VALUES


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"type": None}, "parameters.type is None"),
        ({"properties": {"a": {"type": 3}}}, "parameters.a.type is 3"),
        ({"properties": {"a": {"type": [{"b": 1}]}}}, "parameters.a.type is {'b': 1}"),
        ({"properties": None}, "parameters.properties must be an object"),
        ({"properties": {"a": {}}, "required": None}, "parameters.required must be a list of names"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "parameters.required names ['a'], which is no property"),
    ],
)
def test_a_tool_with_no_valid_schema_is_named_and_called(parameters: dict[str, Any], problem: str) -> None:
    tool = ToolSpec(name="look", description="", parameters=parameters)
    assert any(problem in found for found in find_tool_problems([tool])), find_tool_problems([tool])
    for build in (build_random_policy, build_guessing_player):
        assert '"look"' in build(1)(ASKED, (tool,))
