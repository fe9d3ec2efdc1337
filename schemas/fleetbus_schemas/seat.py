"""Seats: several parts in one episode that a policy plays, each with its own context, tokens and reward. Parts of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

MAX_SEATS = 64
"""Of one episode."""

SHARED = "shared"
"""The reason of a reward that is the episode's, also where a judge of whole groups changes that one."""

ELSEWHERE = "the learner of another policy trains it"
"""The reason of a seat without a reward in what one learner makes of a result that several train."""


class OfSeat(Protocol):
    """A part of an episode's request about one seat."""

    @property
    def seat(self) -> str: ...


T = TypeVar("T", bound=OfSeat)


class SeatLimit(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Limits of one seat of an episode, whoever plays it: of its turns, and of the tokens that these add in all its contexts.
    None: none of its own. A seat that would act beyond one ends the episode as ``truncated``."""

    seat: Annotated[str, Meta(min_length=1)]
    max_turns: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class EpisodeSeat(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One seat of a finished episode, in the order in which the seats first acted.

    ``turns`` are the numbers of its turns, ascending; each turn of an episode with seats is in one of them. ``reward`` is the
    seat's own, compared with that of the same seat in other episodes of the group. None: it is not trained, ``reason`` says
    why, and its turns are in `EpisodeFinished.untrained`. With the reason `SHARED` it is worth what the episode is.
    ``policy`` plays and trains it, and sampled it with ``versions``; empty where that is the policy of the request. A seat that
    one of that policy's versions plays as an opponent names it, and has as its ``score`` what the verdict says of it: that
    rates players, and is nobody's reward.
    """

    name: str
    turns: tuple[int, ...]
    reward: float | None = None
    reason: str = ""
    policy: str = ""
    versions: tuple[int, ...] = ()
    score: float | None = None


def map_by_seat(said: Iterable[T]) -> dict[str, T]:
    """By seat; the first one that is said of it."""
    found: dict[str, T] = {}
    for each in said:
        found.setdefault(each.seat, each)
    return found
