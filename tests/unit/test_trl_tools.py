"""The schemas that TRL makes of methods, by transformers' `get_json_schema`, are those of the environment's tools."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import ToolSpec
from fleetbus_workers.trainers.trl_tools import MAX_CHARACTERS, build_methods

pytest.importorskip("torch")  # transformers imports it when it makes a schema: on a busy machine longer than a test may take
get_json_schema = pytest.importorskip("transformers.utils").get_json_schema

PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string", "description": "A text."},
    "count": {"type": "integer", "description": "A number: whole."},
    "share": {"type": "number", "description": "A share."},
    "sure": {"type": "boolean", "description": "Whether."},
    "kind": {"type": "string", "enum": ["a", "b"], "description": "One of two."},
    "flag": {"type": "boolean", "enum": [True], "description": "One of one."},
    "level": {"type": "integer", "enum": [1, 2], "description": "One of two."},
    "many": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "description": "Rows."},
    "any": {"description": "Anything."},
    "either": {"type": ["integer", "string"], "description": "A number or a text."},
}


def read_schema(parameters: dict[str, Any], description: str = "Do it.") -> dict[str, Any]:
    (method,) = build_methods([ToolSpec("act", description, parameters)], lambda *_: "").values()
    bound = getattr(type("Environment", (), {"act": method})(), "act")  # noqa: B009 - as TRL takes it
    function: dict[str, Any] = get_json_schema(bound)["function"]
    return function


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("required", [True, False])
def test_what_a_type_hint_can_say_arrives_unchanged(name: str, required: bool) -> None:
    parameters = {"type": "object", "properties": {name: PROPERTIES[name]}, **({"required": [name]} if required else {})}
    assert read_schema(parameters)["parameters"] == parameters


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 1, "description": "How many."}, '{"type": "integer", "minimum": 1}'),
        ({"$ref": "#/$defs/Place"}, '{"type": "object", "properties": {"x": {"type": "integer"}}}'),
        ({"type": "integer", "default": 5}, '"default": 5'),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/Loop"}}}, '"properties": {"x": '),
    ],
)
def test_what_it_cannot_say_is_in_the_description(schema: dict[str, Any], said: str) -> None:
    definitions = {
        "Place": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Loop": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Loop"}}},
    }
    read = read_schema({"type": "object", "properties": {"value": schema}, "$defs": definitions})
    assert said in read["parameters"]["properties"]["value"]["description"]


def test_sections_in_a_tool_s_own_description_are_no_arguments() -> None:
    described = "Sell it.\n\nArgs:\n    price: In cents.\n\nReturns:\n    A receipt."
    read = read_schema({"type": "object", "properties": {"price": PROPERTIES["count"]}}, described)
    assert read["parameters"]["properties"] == {"price": PROPERTIES["count"]}
    assert "In cents." in read["description"]
    assert "A receipt." in read["description"]


def test_names_that_python_or_trl_do_not_take_are_changed_for_the_model_alone() -> None:
    called: list[tuple[str, dict[str, Any]]] = []

    def call(_: Any, name: str, arguments: dict[str, Any]) -> str:
        called.append((name, arguments))
        return "done"

    names = {"from": {}, "x-y": {}, "self": {}, "2nd": {}}
    methods = build_methods(
        [ToolSpec(name, "", {"properties": names}) for name in ("reset", "failure", "_hidden", "a-b")], call
    )
    assert list(methods) == ["tool_reset", "tool_failure", "tool__hidden", "a-b"]
    given = {"from_": 1, "x_y": 2, "self_": 3, "_2nd": 4}
    assert methods["tool_reset"](None, **given) == "done"
    assert called == [("reset", {"from": 1, "x-y": 2, "self": 3, "2nd": 4})]
    assert {*get_json_schema(methods["a-b"])["function"]["parameters"]["properties"]} == {*given}


@pytest.mark.parametrize("described", ["One of (choices: a, b)", "Which. Args: x", "KwArgs:\n  x", "Raises: never", " \n "])
def test_what_transformers_reads_in_descriptions_is_no_syntax_here(described: str) -> None:
    tool = {"type": "object", "properties": {"kind": {"type": "string", "description": described}}}
    assert [*read_schema(tool, described)["parameters"]["properties"]] == ["kind"]
    assert read_schema({"type": "object", "properties": {}}, described)["description"]
    noted = {"type": "string", "description": "It.", "examples": [described], "minLength": 1}
    assert [*read_schema({"type": "object", "properties": {"kind": noted}})["parameters"]["properties"]] == ["kind"]


def test_schemas_that_name_themselves_stay_of_their_own_size() -> None:
    again = {f"{letter}": {"$ref": "#/$defs/Node"} for letter in "abcdefgh"}
    node = {"type": "object", "properties": again}
    definitions = {"Node": node} | {f"N{depth}": {"anyOf": [{"$ref": f"#/$defs/N{depth + 1}"}] * 8} for depth in range(20)}
    for name in ("Node", "N0"):
        read = read_schema({"type": "object", "properties": {"value": {"$ref": f"#/$defs/{name}"}}, "$defs": definitions})
        assert len(str(read)) < 2 * MAX_CHARACTERS
    assert read_schema({"type": "object", "properties": {"value": {"type": ["array"] * 40, "items": {"type": "string"}}}})


def test_many_references_to_one_long_definition_take_what_there_is_room_for() -> None:
    def read(characters: int) -> tuple[str, float]:
        place = {"type": "object", "properties": {"kind": {"enum": ["x" * 100] * (characters // 100)}}}
        properties = {f"p{number}": {"$ref": "#/$defs/Place"} for number in range(64)}
        began = time.process_time()
        (method,) = build_methods(
            [ToolSpec("act", "", {"properties": properties, "$defs": {"Place": place}})], lambda *_: ""
        ).values()
        return method.__doc__ or "", time.process_time() - began

    said, _ = read(500)
    assert said.count("enum") == 64
    said, seconds = read(1 << 20)
    assert len(said) < MAX_CHARACTERS and seconds < 1.0, "one for each took six seconds"


def test_thousands_of_alternatives_are_joined_at_once() -> None:
    began = time.process_time()
    read = read_schema({"type": "object", "properties": {"value": {"anyOf": [{"const": value} for value in range(3000)]}}})
    assert len(read["parameters"]["properties"]["value"]["anyOf"]) == 3000
    assert time.process_time() - began < 10, "one by one it is half a minute"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"properties": {"x": {"anyOf": 5}}}, "tool 'act' has a schema that cannot be read"),
        ({"properties": ["x"]}, "tool 'act' has a schema that cannot be read"),
        ({"properties": {"x": {}}, "required": True}, "tool 'act' has a schema that cannot be read"),
        ({"properties": {"a-b": {}, "a_b": {}}}, "'a_b'.* one name"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_with_its_tool_s_name(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_schema(parameters)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools are called 'tool_reset'"):
        build_methods([ToolSpec("reset"), ToolSpec("tool_reset")], lambda *_: "")


def test_a_schema_that_takes_anything_is_any_value() -> None:
    assert [*read_schema({"type": "object", "properties": {"x": {"anyOf": [True]}}})["parameters"]["properties"]] == ["x"]
