"""Every message survives the wire, and readers take no notice of fields that they do not know yet."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from fleetbus_schemas import MESSAGES, EpisodeFinished, Heartbeat, MalformedMessage, Message, decode, encode
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.names import list_name_fields

each_message = pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])

INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """A strategy for every value that ``kind`` allows; a kind that the contract did not use before fails here."""
    match kind:
        case inspect.StructType(cls=struct, fields=fields):
            required = {field.name: values(field.type) for field in fields if field.required}
            optional = {field.name: values(field.type) for field in fields if not field.required}
            return st.fixed_dictionaries(required, optional=optional).map(lambda content: struct(**content))
        case inspect.UnionType(types=types):
            return st.one_of([values(each) for each in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case inspect.AnyType():
            return JSON_LIKE
        case inspect.IntType(ge=int(least), le=most):
            return st.integers(least, 2**64 - 1 if most is None else most)
        case inspect.Metadata(type=inspect.StrType(min_length=least), extra={"is_name": True}):
            return st.from_regex(rf"\A[A-Za-z0-9_-]{{{least or 0},128}}\Z")
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case inspect.StrType(min_length=int(least)):
            return st.text(min_size=least, max_size=12)
    return {
        inspect.IntType: INTEGERS,
        inspect.FloatType: FLOATS,
        inspect.StrType: st.text(max_size=12),
        inspect.BytesType: st.binary(max_size=12),
        inspect.BoolType: st.booleans(),
        inspect.NoneType: st.none(),
    }[type(kind)]


def is_array(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.VarTupleType) or (isinstance(kind, inspect.StructType) and kind.array_like)


def widened(kind: inspect.Type, wire: Any, unknown: Any) -> Any:
    """What a later version might send: every struct in ``wire`` with one more field at its end."""
    match kind:
        case inspect.StructType(array_like=True, fields=fields):
            return [*(widened(field.type, item, unknown) for field, item in zip(fields, wire, strict=True)), unknown]
        case inspect.StructType(fields=fields):
            kinds = {field.encode_name: field.type for field in fields}
            known = {name: widened(kinds[name], item, unknown) if name in kinds else item for name, item in wire.items()}
            return known | {"field_of_a_later_version": unknown}
        case inspect.VarTupleType(item_type=item):
            return [widened(item, each, unknown) for each in wire]
        case inspect.UnionType(types=types) if isinstance(wire, dict):
            return widened(next(each for each in types if getattr(each, "tag", None) == wire.get("type")), wire, unknown)
        case inspect.UnionType(types=types) if isinstance(wire, list):
            return widened(next(each for each in types if is_array(each)), wire, unknown)
    return wire


@cache
def messages(message_type: type[Message]) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(message_type))


@each_message
@quick
@given(data=st.data())
def test_a_message_that_was_encoded_decodes_to_an_equal_one(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type))
    payload = encode(message)
    assert decode(message_type, payload) == message
    assert decode_any(MESSAGES, payload) == message


@each_message
@quick
@given(data=st.data(), unknown=JSON_LIKE)
def test_unknown_fields_are_ignored_at_every_level(message_type: type[Message], data: st.DataObject, unknown: Any) -> None:
    message = data.draw(messages(message_type))
    later = widened(inspect.type_info(message_type), msgspec.msgpack.decode(encode(message)), unknown)
    payload = msgspec.msgpack.encode(later)
    assert payload != encode(message)
    assert decode(message_type, payload) == message


@each_message
@quick
@given(data=st.data())
def test_the_order_of_fields_on_the_wire_does_not_matter(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type))
    wire = msgspec.msgpack.decode(encode(message))
    shuffled = dict(data.draw(st.permutations(list(wire.items()))))
    assert decode(message_type, msgspec.msgpack.encode(shuffled)) == message


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0])
def test_numbers_that_json_does_not_know_survive(number: float) -> None:
    sent = Heartbeat(role="learner", worker="w", counters={"loss": number})
    received = decode(Heartbeat, encode(sent)).counters["loss"]
    assert (
        math.isnan(received)
        if math.isnan(number)
        else (received, math.copysign(1, received)) == (number, math.copysign(1, number))
    )


def test_no_reward_and_a_reward_of_zero_stay_different() -> None:
    def finished(reward: float | None) -> EpisodeFinished:
        return EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker="w", reward=reward)

    assert decode(EpisodeFinished, encode(finished(0.0))).reward == 0.0
    assert decode(EpisodeFinished, encode(finished(None))).reward is None


@each_message
def test_messages_are_immutable(message_type: type[Message]) -> None:
    config = message_type.__struct_config__
    assert config.frozen and config.tag == message_type.__name__ and config.omit_defaults


NAMED = [(kind, field) for kind in MESSAGES for field in list_name_fields(kind)]


def replace(message: Any, field: str, value: str) -> Any:
    name, _, inner = field.partition(".")
    return msgspec.structs.replace(message, **{name: replace(getattr(message, name), inner, value) if inner else value})


@pytest.mark.parametrize(("kind", "field"), NAMED, ids=lambda each: each if isinstance(each, str) else each.__name__)
@settings(quick, max_examples=2)
@given(data=st.data())
def test_a_field_that_names_something_takes_no_more_than_a_token_of_a_subject(
    kind: type[Message], field: str, data: st.DataObject
) -> None:
    message = data.draw(values(inspect.type_info(kind)))
    for wrong in ("a.b", "*", ">", "a b", "a\n", "a\0", "é", "x" * 129, "x" * 5000):
        with pytest.raises(MalformedMessage):
            decode(kind, encode(replace(message, field, wrong)))


def test_every_name_is_checked_where_it_stands() -> None:
    """`decode` looks at the fields of a message and of one that it contains: deeper ones have the pattern in their type."""

    def find(kind: inspect.Type, path: tuple[str, ...]) -> set[str]:
        match kind:
            case inspect.StructType(fields=fields):
                return {name for each in fields for name in find(each.type, (*path, each.name))}
            case inspect.Metadata(extra={"is_name": True}):
                return {".".join(path)}
            case inspect.VarTupleType(item_type=inner) | inspect.DictType(value_type=inner):
                return find(inner, (*path, "*"))
            case inspect.Metadata(type=inner):
                return find(inner, path)
            case inspect.UnionType(types=types):
                return {name for inner in types for name in find(inner, (*path, "|"))}
        return set()

    assert len(NAMED) > 30
    for kind in MESSAGES:
        assert find(inspect.type_info(kind), ()) == {*list_name_fields(kind)}
