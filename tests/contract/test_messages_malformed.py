"""Whatever bytes arrive: `decode` returns a message or raises `MalformedMessage` with the subject and a reason."""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from fleetbus_schemas import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Action,
    LaneLease,
    MalformedMessage,
    Message,
    ToolCall,
    WorkerFailed,
    decode,
    encode,
)
from fleetbus_schemas.message import MAX_REASON_CHARACTERS, decode_any

EXAMPLES: dict[type[Message], Message] = runpy.run_path(str(Path(__file__).with_name("examples.py")))["EXAMPLES"]
SUBJECT = "fb.run.episode.e1"

each_message = pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)
any_message = st.sampled_from(MESSAGES)
thorough = settings(max_examples=150, deadline=None)

DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.datetimes()
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3),
    max_leaves=5,
)
WRONG_FOR_EVERY_FIELD = {1: 2}
"""A map whose key is no string: neither a struct, nor a dict of this contract, nor any scalar."""


def rejection(expected: type[Message], payload: bytes) -> MalformedMessage:
    """The error that ``payload`` is refused with."""
    with pytest.raises(MalformedMessage) as caught:
        decode(expected, payload, subject=SUBJECT)
    error = caught.value
    assert error.subject == SUBJECT and SUBJECT in str(error)
    assert error.reason and error.reason in str(error)
    assert error.reason.isprintable() and len(error.reason) <= MAX_REASON_CHARACTERS
    return error


def tolerate(expected: type[Message], payload: bytes) -> None:
    """Decode, and let through `MalformedMessage` alone."""
    try:
        assert type(decode(expected, payload, subject=SUBJECT)) is expected
    except MalformedMessage as error:
        assert error.subject == SUBJECT and error.reason and error.reason.isprintable()


def wire_of(message_type: type[Message]) -> dict[str, Any]:
    wire: dict[str, Any] = msgspec.msgpack.decode(encode(EXAMPLES[message_type]))
    return wire


def places(kind: inspect.Type, wire: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Path of every typed value inside a wire document, the outermost ones first."""
    match kind:
        case inspect.StructType(fields=fields):
            for index, field in enumerate(fields):
                if isinstance(field.type, inspect.AnyType):  # plain data of an environment: any value is right
                    continue
                key = index if isinstance(wire, list) else field.encode_name
                yield (*path, key)
                yield from places(field.type, wire[key], (*path, key))
        case inspect.VarTupleType(item_type=item):
            for index, each in enumerate(wire):
                yield (*path, index)
                yield from places(item, each, (*path, index))
        case inspect.UnionType(types=types) if isinstance(wire, dict):
            yield from places(next(each for each in types if getattr(each, "tag", None) == wire.get("type")), wire, path)
        case inspect.UnionType(types=types) if isinstance(wire, list):
            arrays = [each for each in types if isinstance(each, inspect.VarTupleType) or getattr(each, "array_like", False)]
            yield from places(arrays[0], wire, path)


def replaced(wire: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    copy = wire.copy()
    copy[path[0]] = replaced(wire[path[0]], path[1:], value)
    return copy


def with_arguments(raw: bytes) -> bytes:
    """An Action whose tool call has ``{"k": <raw msgpack>}`` as arguments."""
    return msgspec.msgpack.encode(
        wire_of(Action) | {"tool_calls": [{"name": "n", "arguments": {"k": msgspec.Raw(raw)}}]},
    )


def with_unknown(message_type: type[Message], raw: bytes) -> bytes:
    return msgspec.msgpack.encode(wire_of(message_type) | {"unknown": msgspec.Raw(raw)})


@each_message
def test_bytes_that_were_cut_short_anywhere_are_refused(message_type: type[Message]) -> None:
    payload = encode(EXAMPLES[message_type])
    for length in range(len(payload)):
        rejection(message_type, payload[:length])


@each_message
def test_bytes_after_the_message_are_refused(message_type: type[Message]) -> None:
    assert "trailing" in rejection(message_type, encode(EXAMPLES[message_type]) + b"\x00").reason


@each_message
def test_every_other_message_is_refused_and_the_reason_names_its_type(message_type: type[Message]) -> None:
    for other in MESSAGES:
        if other is not message_type:
            reason = rejection(message_type, encode(EXAMPLES[other])).reason
            assert other.__name__ in reason and "$.type" in reason


TAGS = ["", "action", "Message", "Nothing\nat \x1b[31mall", "x" * 100_000, 7, None, ["Action"]]


@each_message
def test_a_tag_that_is_no_message_type_is_refused_in_one_short_line(message_type: type[Message]) -> None:
    for tag in TAGS:
        rejection(message_type, msgspec.msgpack.encode(wire_of(message_type) | {"type": tag}))


@each_message
def test_a_message_without_a_tag_is_refused(message_type: type[Message]) -> None:
    untagged = {name: value for name, value in wire_of(message_type).items() if name != "type"}
    assert "`type`" in rejection(message_type, msgspec.msgpack.encode(untagged)).reason


def test_one_of_several_types_needs_a_tag_among_them() -> None:
    payload = encode(EXAMPLES[LaneLease])
    assert decode_any((Action, LaneLease), payload) == EXAMPLES[LaneLease]
    with pytest.raises(MalformedMessage, match=r"LaneLease.*\$\.type"):
        decode_any((Action, WorkerFailed), payload, subject=SUBJECT)


@each_message
def test_a_required_field_that_is_missing_is_named_in_the_reason(message_type: type[Message]) -> None:
    wire = wire_of(message_type)
    for field in msgspec.structs.fields(message_type):
        if field.required:
            rest = {name: value for name, value in wire.items() if name != field.encode_name}
            assert f"`{field.encode_name}`" in rejection(message_type, msgspec.msgpack.encode(rest)).reason


@each_message
def test_a_value_of_the_wrong_type_is_refused_at_every_place_and_the_reason_names_the_field(
    message_type: type[Message],
) -> None:
    wire = wire_of(message_type)
    for path in places(inspect.type_info(message_type), wire):
        error = rejection(message_type, msgspec.msgpack.encode(replaced(wire, path, WRONG_FOR_EVERY_FIELD)))
        assert f"$.{path[0]}" in error.reason


@each_message
def test_text_that_is_no_utf8_is_refused(message_type: type[Message]) -> None:
    for name, value in wire_of(message_type).items():
        if isinstance(value, str):
            raw = msgspec.Raw(b"\xa2\xff\xfe")
            rejection(message_type, msgspec.msgpack.encode(wire_of(message_type) | {name: raw}))


@given(message_type=any_message, payload=st.binary(max_size=64))
@thorough
def test_random_bytes_are_refused(message_type: type[Message], payload: bytes) -> None:
    rejection(message_type, payload)


@given(message_type=any_message, document=DOCUMENTS)
@thorough
def test_a_document_of_any_other_kind_is_refused(message_type: type[Message], document: object) -> None:
    rejection(message_type, msgspec.msgpack.encode(document))


@given(data=st.data(), message_type=any_message, document=DOCUMENTS)
@thorough
def test_any_document_in_the_place_of_any_value_is_taken_or_refused(
    data: st.DataObject, message_type: type[Message], document: object
) -> None:
    wire = wire_of(message_type)
    path = data.draw(st.sampled_from(list(places(inspect.type_info(message_type), wire))))
    tolerate(message_type, msgspec.msgpack.encode(replaced(wire, path, document)))


@given(data=st.data(), message_type=any_message)
@thorough
def test_flipped_bytes_are_taken_or_refused(data: st.DataObject, message_type: type[Message]) -> None:
    payload = bytearray(encode(EXAMPLES[message_type]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    tolerate(message_type, bytes(payload))


ENDLESS = 300_000
"""Deeper than any interpreter follows: up to 3.11 a thousand, from 3.12 on some ten thousand."""


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x81"], ids=["arrays", "maps", "maps as keys"])
def test_endless_nesting_is_refused_wherever_it_stands(opening: bytes) -> None:
    nested = opening * ENDLESS + b"\x01"
    for payload in (nested, with_arguments(nested), with_unknown(LaneLease, nested)):
        rejection(Action, payload)
    tolerate(LaneLease, with_unknown(LaneLease, nested))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x81"], ids=["arrays", "maps", "maps as keys"])
def test_deep_nesting_is_taken_or_refused_as_the_interpreter_allows(opening: bytes) -> None:
    nested = opening * 2_000 + b"\x01"
    for payload in (nested, with_arguments(nested), with_unknown(Action, nested)):
        tolerate(Action, payload)


@each_message
def test_endless_nesting_in_an_unknown_field_is_refused_by_every_type(message_type: type[Message]) -> None:
    assert "recursion" in rejection(message_type, with_unknown(message_type, b"\x91" * ENDLESS + b"\x01")).reason


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"], ids=["array", "map", "bin", "str", "ext"])
def test_a_header_that_promises_four_billion_items_is_refused_at_once(header: bytes) -> None:
    lie = header + b"\xff\xff\xff\xff"
    began = time.process_time()
    for payload in (lie, with_arguments(lie), with_unknown(Action, lie)):
        rejection(Action, payload)
    assert time.process_time() - began < 1.0


HOSTILE_VALUES = {
    "map with a map as key": b"\x81\x81\x01\x02\x03",
    "map with an array of maps as key": b"\x81\x91\x81\x01\x02\x03",
    "map with an extension as key": b"\x81\xd4\x05\x00\x03",
    "timestamp with too many nanoseconds": b"\xd7\xff" + b"\xff" * 8,
    "timestamp after the year 9999": b"\xc7\x0c\xff" + b"\x00" * 4 + b"\x7f" + b"\xff" * 7,
    "timestamp of one byte": b"\xd4\xff\x00",
    "opcode that msgpack never uses": b"\xc1",
    "lone surrogate": b"\xa3\xed\xa0\x80",
}


@pytest.mark.parametrize("raw", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES.keys())
def test_values_that_python_cannot_hold_are_refused(raw: bytes) -> None:
    rejection(Action, with_arguments(raw))


def sized(total_bytes: int) -> WorkerFailed:
    """A message of exactly that many encoded bytes (over 65,536)."""
    empty = WorkerFailed(role="learner", worker="w", error_class="E", error="x" * 65_536)
    missing = total_bytes - len(encode(empty))
    return WorkerFailed(role="learner", worker="w", error_class="E", error="x" * (65_536 + missing))


def test_the_largest_message_passes() -> None:
    message = sized(MAX_MESSAGE_BYTES)
    payload = encode(message, subject=SUBJECT)
    assert len(payload) == MAX_MESSAGE_BYTES
    assert decode(WorkerFailed, payload) == message


def test_a_message_one_byte_larger_is_neither_encoded_nor_decoded() -> None:
    message = sized(MAX_MESSAGE_BYTES + 1)
    with pytest.raises(MalformedMessage, match=f"WorkerFailed of {MAX_MESSAGE_BYTES + 1} bytes") as caught:
        encode(message, subject=SUBJECT)
    assert caught.value.subject == SUBJECT
    assert f"{MAX_MESSAGE_BYTES + 1} bytes" in rejection(WorkerFailed, msgspec.msgpack.encode(message)).reason


def test_the_subject_may_be_unknown() -> None:
    with pytest.raises(MalformedMessage, match=r"no subject"):
        decode(Action, b"")


def endless() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


UNENCODABLE: dict[str, Any] = {
    "lone surrogate": "\ud800",
    "integer over 64 bits": 10**30,
    "foreign object": object(),
    "endless nesting": endless(),
}


@pytest.mark.parametrize("value", UNENCODABLE.values(), ids=UNENCODABLE.keys())
def test_a_value_that_has_no_bytes_is_refused_by_encode(value: Any) -> None:
    action = Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=(ToolCall(name="n", arguments={"k": value}),))
    with pytest.raises(MalformedMessage, match=r"Action cannot be encoded: .") as caught:
        encode(action, subject=SUBJECT)
    assert caught.value.subject == SUBJECT
