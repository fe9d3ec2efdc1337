"""Entries that a client stored and that its log may have lost since. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

E = TypeVar("E")

MAX_DOUBTS = 16
"""Of more, the newest but one is forgotten."""


def add_doubts(doubted: Sequence[E], more: Iterable[E]) -> list[E]:
    """Each entry once, in order: a log that is lost twice before anybody looks may have the one and not the other."""
    known = list(doubted)
    for entry in more:
        if entry not in known:
            known[MAX_DOUBTS - 1 :] = [entry]
    return known
