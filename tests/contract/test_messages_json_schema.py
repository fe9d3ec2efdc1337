"""The exported JSON Schema describes the messages as they are: it takes every example and refuses what `decode` refuses."""

from __future__ import annotations

import inspect
import json
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import MESSAGES, Action, Message
from fleetbus_schemas.export import DIALECT, build_json_schema

EXAMPLES: dict[type[Message], Message] = runpy.run_path(str(Path(__file__).with_name("examples.py")))["EXAMPLES"]

each_message = pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(build_json_schema())
    return jsonschema.Draft202012Validator(build_json_schema())


def as_json(message: Message) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(msgspec.json.encode(message))
    return document


@each_message
def test_the_schema_takes_the_example_as_json(message_type: type[Message], validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(as_json(EXAMPLES[message_type]))] == []


@each_message
def test_the_schema_takes_fields_that_it_does_not_know(message_type: type[Message], validator: Any) -> None:
    assert validator.is_valid(as_json(EXAMPLES[message_type]) | {"field_of_a_later_version": [1]})


@each_message
def test_the_schema_refuses_a_missing_field_and_a_wrong_type_of_message(message_type: type[Message], validator: Any) -> None:
    document = as_json(EXAMPLES[message_type])
    required = [field.encode_name for field in msgspec.structs.fields(message_type) if field.required]
    for name in ["type", *required]:
        assert not validator.is_valid({key: value for key, value in document.items() if key != name}), name
    assert not validator.is_valid(document | {"type": "Nothing"})


@each_message
def test_the_schema_refuses_a_value_of_the_wrong_type_in_every_field(message_type: type[Message], validator: Any) -> None:
    document = as_json(EXAMPLES[message_type])
    for field in msgspec.structs.fields(message_type):
        wrong: Any = 7.5 if isinstance(document[field.encode_name], str | list | dict | bool) else "text"
        assert not validator.is_valid(document | {field.encode_name: wrong}), field.name


def test_the_document_is_one_json_schema_over_all_messages() -> None:
    schema = build_json_schema()
    assert schema["$schema"] == DIALECT
    assert schema["oneOf"] == [{"$ref": f"#/$defs/{message_type.__name__}"} for message_type in MESSAGES]
    assert json.loads(json.dumps(schema)) == schema


def test_every_reference_inside_the_document_leads_to_a_definition() -> None:
    schema = build_json_schema()
    references: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            references.extend(value for key, value in node.items() if key == "$ref")
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(schema)
    assert {reference.removeprefix("#/$defs/") for reference in references} == set(schema["$defs"])


@each_message
def test_each_definition_carries_the_docstring_of_its_message(message_type: type[Message]) -> None:
    definition = build_json_schema()["$defs"][message_type.__name__]
    assert definition["description"] == inspect.cleandoc(message_type.__doc__ or "")
    assert definition["properties"]["type"] == {"enum": [message_type.__name__]}
    assert "type" in definition["required"]


def test_positions_of_structs_that_travel_as_arrays_are_named() -> None:
    schema = build_json_schema()
    assert [item["title"] for item in schema["$defs"]["VersionSpan"]["prefixItems"]] == ["version", "start", "stop"]
    assert [item["title"] for item in schema["$defs"]["TensorEntry"]["prefixItems"]] == ["name", "shape", "dtype", "sha256"]


def test_changing_one_result_leaves_the_next_one_untouched() -> None:
    build_json_schema()["$defs"].pop(Action.__name__)
    assert Action.__name__ in build_json_schema()["$defs"]
