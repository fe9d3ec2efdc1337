"""Bytes that were once on the wire decode for ever, and mean what they meant. Add missing files with `just golden`."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import MESSAGES, Message, decode, encode

GOLDEN = Path(__file__).with_name("golden")
EXAMPLES: dict[type[Message], Message] = runpy.run_path(str(GOLDEN.with_name("examples.py")))["EXAMPLES"]
ADD = runpy.run_path(str(GOLDEN / "add.py"))

each_message = pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)


def unfilled(value: Any, path: str) -> Iterator[str]:
    """Paths of the fields in a struct, or in the structs inside it, that still have their default."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            current = getattr(value, field.name)
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            if current == default:
                yield f"{path}.{field.name}"
            yield from unfilled(current, f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for item in value:
            yield from unfilled(item, path)


def test_every_message_type_has_an_example_and_no_example_is_left_over() -> None:
    assert set(EXAMPLES) == set(MESSAGES)


def test_every_subclass_of_message_is_listed_in_the_contract() -> None:
    declared = {kind for kind in Message.__subclasses__() if kind.__module__.startswith("fleetbus_schemas.")}
    assert declared == set(MESSAGES)


@each_message
def test_the_example_fills_every_field_with_something_else_than_its_default(message_type: type[Message]) -> None:
    assert list(unfilled(EXAMPLES[message_type], message_type.__name__)) == []


@each_message
def test_the_newest_golden_bytes_decode_to_the_example_and_the_example_encodes_to_them(message_type: type[Message]) -> None:
    files = ADD["stored"](GOLDEN, message_type.__name__)
    assert files, "no golden bytes yet: run `just golden`"
    payload = files[-1].read_bytes()
    assert decode(message_type, payload, subject="golden") == EXAMPLES[message_type]
    assert encode(EXAMPLES[message_type]) == payload


@each_message
def test_golden_bytes_of_every_age_lose_nothing_when_they_are_decoded_and_encoded_again(message_type: type[Message]) -> None:
    for file in ADD["stored"](GOLDEN, message_type.__name__):
        payload = file.read_bytes()
        again = encode(decode(message_type, payload, subject=file.name))
        assert holds(msgspec.msgpack.decode(again), msgspec.msgpack.decode(payload)), (
            file.name
        )  # a map's length has several forms


def holds(newer: Any, older: Any) -> bool:
    """True if all that the older value holds stands in the newer one: a struct that is an array may have grown at its end."""
    if isinstance(older, dict):
        return newer.keys() == older.keys() and all(holds(newer[key], value) for key, value in older.items())
    if isinstance(older, list):
        return len(newer) >= len(older) and all(map(holds, newer, older))
    return bool(newer == older)


def test_every_golden_file_belongs_to_a_message_that_still_exists() -> None:
    names = {message_type.__name__ for message_type in MESSAGES}
    assert {file.name.split(".")[0] for file in GOLDEN.glob("*.bin")} == names


def test_no_default_on_the_wire_ever_changes() -> None:
    known: dict[str, Any] = json.loads((GOLDEN / "defaults.json").read_text())
    assert ADD["defaults"]() == known, "a new default: run `just golden`; a changed one: old bytes would change their meaning"


def test_adding_golden_bytes_writes_every_file_once_and_overwrites_none(tmp_path: Path) -> None:
    written = ADD["add_missing"](EXAMPLES, tmp_path)
    assert sorted(written) == sorted(file.name for file in GOLDEN.iterdir() if re.search(r"^\w+\.bin$|\.json$", file.name))
    assert ADD["add_missing"](EXAMPLES, tmp_path) == []


def test_a_message_that_gains_a_field_gets_a_second_file_beside_the_first(tmp_path: Path) -> None:
    message_type = MESSAGES[0]
    example = EXAMPLES[message_type]
    (tmp_path / f"{message_type.__name__}.bin").write_bytes(b"bytes of a shape before the newest field")
    added = [name for name in ADD["add_missing"]({message_type: example}, tmp_path) if name.endswith(".bin")]
    assert added == [f"{message_type.__name__}.2.bin"]
    assert (tmp_path / f"{message_type.__name__}.bin").read_bytes() == b"bytes of a shape before the newest field"
    assert (tmp_path / added[0]).read_bytes() == encode(example)


def test_a_known_default_stays_in_the_file_when_new_ones_are_added(tmp_path: Path) -> None:
    (tmp_path / "defaults.json").write_text('{"Gone.field": 1}')
    ADD["add_missing"]({}, tmp_path)
    assert json.loads((tmp_path / "defaults.json").read_text()) == ADD["defaults"]() | {"Gone.field": 1}
