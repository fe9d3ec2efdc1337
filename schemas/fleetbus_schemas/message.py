"""The base of every message, and the only place where messages become bytes and bytes become messages.

Wire format: msgpack maps with the class name under ``type``. Compatibility rule: fields are only ever added, always with a
default that never changes; unknown fields are ignored. `decode` raises one typed error, `MalformedMessage`, for every fault.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from fleetbus_schemas.names import find_wrong_name

MAX_MESSAGE_BYTES = (1 << 20) - 4096
"""Largest payload that is encoded or decoded, in bytes: nats-server's default ``max_payload``, which counts headers too."""

MAX_INLINE_BYTES = 256 << 10
"""Largest content, in bytes, that travels inside a message; anything larger travels as a reference."""

MAX_REASON_CHARACTERS = 300
"""Longest ``reason`` of a `MalformedMessage`."""

Key = Annotated[str, Meta(max_length=256)]
"""The name of a call, which its answer repeats beside contents of its own: with one of a megabyte there is no answer."""

Digest = Annotated[bytes, Meta(max_length=64)]
"""A hash, which an answer repeats beside contents of its own."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Of turns, attempts and the like: it fits the columns and arrays that keep it."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes that are none of what is expected. Text that is no UTF-8, and values in values without end,
are no `DecodeError` of its own."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of everything that travels on the bus: immutable, tagged with its class name."""

    grown: ClassVar[bool] = False
    """True for a type that had 15 fields at most when it was first sent: msgspec writes a longer header for types with more,
    and the bytes of a message may not change with a field that it leaves out."""


class MalformedMessage(ValueError):
    """A payload that is no message: wrong tag, truncated, oversized, or a field of the wrong type.

    ``subject`` is where it was found, ``reason`` one line that says what is wrong.
    """

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"malformed message on {subject or '(no subject)'}: {reason}")
        self.subject = subject
        self.reason = reason


M = TypeVar("M", bound=Message)


def _format_one_line(error: Exception) -> str:
    """The text of ``error``, as far as it fits a log line: it may quote a whole payload."""
    printable = "".join(character if character.isprintable() else " " for character in str(error)[:MAX_REASON_CHARACTERS])
    return printable or type(error).__name__


class _Untagged(msgspec.Struct, tag=""):
    """Added to every decoder's types: msgspec asks for the tag of a union, but not for that of a single type."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[tuple[type[Message], ...], msgspec.msgpack.Decoder[object]] = {}


def encode(message: Message, *, subject: str = "") -> bytes:
    """The msgpack bytes of ``message``. Raises `MalformedMessage` when they exceed `MAX_MESSAGE_BYTES`, or when a value has
    no bytes: a lone surrogate, an integer over 64 bits, a foreign object, endless nesting."""
    try:
        payload = _encoder.encode(message)
    except (msgspec.EncodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(subject, f"{type(message).__name__} cannot be encoded: {_format_one_line(error)}") from error
    if message.grown and payload[:2] == b"\xde\x00" and payload[2] < 16:
        payload = bytes((0x80 | payload[2],)) + payload[3:]
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(subject, f"{type(message).__name__} of {len(payload)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return payload


def decode(expected: type[M], payload: bytes, *, subject: str = "") -> M:
    """The message of type ``expected`` in ``payload``; raises `MalformedMessage` and nothing else."""
    return decode_any((expected,), payload, subject=subject)


def decode_any(expected: tuple[type[M], ...], payload: bytes, *, subject: str = "") -> M:
    """The message in ``payload``, of one of the ``expected`` types; raises `MalformedMessage` and nothing else."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(subject, f"{len(payload)} bytes exceed {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(reduce(or_, expected, _Untagged))
    try:
        message = decoder.decode(payload)
    except (*UNREADABLE, OverflowError, ValueError) as error:
        raise MalformedMessage(subject, _format_one_line(error)) from error
    if not isinstance(message, expected):
        raise MalformedMessage(subject, "the type is empty")
    if field := find_wrong_name(message):
        raise MalformedMessage(subject, f"its {field} is no name")
    return message
