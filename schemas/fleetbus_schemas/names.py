"""Names in messages, each one token of a subject: of names that come in messages subjects are made, and a wildcard among them
would be everybody's.

A pattern of msgspec's is a call of Python in each decoding, 1.6 µs a field; a run has few names, and what was found of them is
kept (docs/decisions/0263).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_NAME_CHARACTERS = 128
KEPT_NAMES = 1 << 14

_TOKEN = re.compile(r"[A-Za-z0-9_-]{0,128}\Z")
_PATTERN = {"pattern": "^[A-Za-z0-9_-]*$"}
_IS_NAME = {"is_name": True}

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS, extra_json_schema=_PATTERN, extra=_IS_NAME)]
"""A name in a field of a message, which `decode` checks; in what stands in a sequence of one it is an `InnerName`."""

OptionalName = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS, extra_json_schema=_PATTERN, extra=_IS_NAME)]
"""The same, or empty: none."""

InnerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
"""A name where `decode` does not look. `$` alone would let a line end follow."""


def is_name(name: str) -> bool:
    """True if it can be one token of a subject."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and _is_token(name)


@lru_cache(maxsize=KEPT_NAMES)
def _is_token(name: str) -> bool:
    return _TOKEN.match(name) is not None


_readers: dict[type[msgspec.Struct], Callable[[object], tuple[str, ...]]] = {}


def find_wrong_name(message: msgspec.Struct) -> str:
    """The first field of type `Name` or `OptionalName` that holds no name; empty if there is none. Empty names and long ones
    msgspec has refused where they may not be."""
    kind = type(message)
    read = _readers.get(kind) or _build_reader(kind)
    if all(map(_is_token, read(message))):
        return ""
    return next(field for field in list_name_fields(kind) if not _is_token(attrgetter(field)(message)))


def _build_reader(kind: type[msgspec.Struct]) -> Callable[[object], tuple[str, ...]]:
    """The values of a message's fields of these types."""
    fields = list_name_fields(kind)
    read = attrgetter(*fields, *fields[:1]) if fields else lambda _: ()  # of one field alone it would give no tuple
    return _readers.setdefault(kind, read)


def list_name_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of these types, in order, with those of a message that it contains (``call.session``)."""
    return tuple(_list_names(msgspec.inspect.type_info(kind)))


def _list_names(kind: msgspec.inspect.Type) -> Iterator[str]:
    if not isinstance(kind, msgspec.inspect.StructType):
        return
    for field in kind.fields:
        if isinstance(field.type, msgspec.inspect.Metadata) and (field.type.extra or {}).get("is_name"):
            yield field.name
        yield from (f"{field.name}.{name}" for name in _list_names(field.type))
