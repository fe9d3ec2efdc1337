"""Mutations of trees of values: what blind changes of bytes rarely make is another document of the same form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec

Place = tuple[Any, Any]
"""A list or dict, and the index or key in it."""

NESTED, BROKEN = "@nested@", "@broken@"
"""Stand for lists in lists, more than any encoder writes, and for text that is no UTF-8: see `write_msgpack`."""

DEPTH = 1500
SCALARS: tuple[Any, ...] = (
    NESTED, BROKEN, None, True, False, 0, 1, -1, 2, 255, 256, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 0.5, 1e308, -1e308, 1e-320, math.nan, math.inf, -math.inf,
    "", "a", "0", "-1", "a.b", ".", "..", "../x", "*", ">", "\0", "\n", "\x1b[2J", "\u202e", "ä", "😀", "\ud800", "x" * 300,
    "{}", "[]", "null", b"", b"\0", b"\xff" * 7, b"\0" * 64,
)  # fmt: skip


def write_msgpack(tree: Any) -> bytes:
    """The bytes of a tree, with what no encoder writes where `NESTED` and `BROKEN` stand."""
    return _break(msgspec.msgpack.encode(tree).replace(msgspec.msgpack.encode(NESTED), b"\x91" * DEPTH + b"\xc0"))


def write_json(tree: Any) -> bytes:
    """As `write_msgpack`, in JSON."""
    return _break(json.dumps(tree).encode().replace(json.dumps(NESTED).encode(), b"[" * DEPTH + b"]" * DEPTH))


def _break(data: bytes) -> bytes:
    return data.replace(BROKEN.encode(), b"\xff" * len(BROKEN))


def mutate_tree(tree: Any, random: Random) -> Any:
    """The tree, changed in one to four places; what was given may be changed, too."""
    holder = [tree]
    for _ in range(1 << random.randrange(3)):
        places = list(_list_places(holder))
        container, key = random.choice(places)
        random.choice(_CHANGES)(container, key, random, places)
    return holder[0] if holder else None


def _list_places(tree: Any) -> Iterator[Place]:
    todo = [tree]
    while todo:
        node = todo.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield node, key
            if isinstance(value, (dict, list)):
                todo.append(value)


def _replace(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    container[key] = random.choice(SCALARS)


def _copy_other(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    other, name = random.choice(places)
    value = other[name] if name in other or (isinstance(other, list) and name < len(other)) else None
    container[key] = value if not isinstance(value, (dict, list)) else _copy(value)


def _remove(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    if len(container) > 1 or isinstance(container, dict):
        del container[key]


def _repeat(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    if isinstance(container, list):
        container[key:key] = [_copy(container[key]) for _ in range(random.choice((1, 2, 40)))]
    else:
        container[random.choice(("", "x", "type", str(key) + "_"))] = _copy(container[key])


def _nest(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    for _ in range(random.choice((1, 2, 40))):
        container[key] = [container[key]] if random.random() < 0.5 else {"x": container[key]}


def _tweak(container: Any, key: Any, random: Random, places: list[Place]) -> None:
    value = container[key]
    if isinstance(value, bool) or value is None:
        container[key] = not value
    elif isinstance(value, (int, float)):
        container[key] = value + random.choice((-1, 1, 2**32)) if random.random() < 0.7 else -value
    elif isinstance(value, (str, bytes)):
        place = random.randrange(len(value) + 1)
        piece: Any = random.choice([each for each in SCALARS if isinstance(each, type(value))])
        container[key] = value[:place] + piece + value[place + random.choice((0, 1, 9)) :]


_CHANGES: tuple[Callable[[Any, Any, Random, list[Place]], None], ...] = (
    *(_replace, _replace, _tweak, _tweak, _copy_other, _copy_other, _remove, _repeat, _nest),
)


def _copy(value: Any) -> Any:
    """Copies are of bounded depth: a tree may hold itself."""
    return _copy_to(value, 8)


def _copy_to(value: Any, depth: int) -> Any:
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {key: _copy_to(each, depth - 1) for key, each in value.items()}
    return [_copy_to(each, depth - 1) for each in value] if isinstance(value, list) else value
