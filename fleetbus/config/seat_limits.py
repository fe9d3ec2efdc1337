"""Limits of single seats: how many turns and tokens each may have in an episode, whoever plays it. Pure.

The setting ``episode.seat_limits`` has one item a line: ``SEAT.max_turns=N`` or ``SEAT.max_tokens=N``
(docs/decisions/0256-limits-of-seats.md).
"""

from __future__ import annotations

import re

import msgspec

from fleetbus.config.settings import EpisodeSettings
from fleetbus.errors import UserError
from fleetbus_schemas import SeatLimit

FORMS = "SEAT.max_turns=N or SEAT.max_tokens=N, with N from 1 to 999999999"

_FORM = re.compile(r"([A-Za-z0-9_-]{1,128})\.(max_turns|max_tokens)=([1-9]\d{0,8})")


def parse_seat_limits(text: str) -> tuple[SeatLimit, ...]:
    """The limits by seat, in the order in which the seats are named. Raises `UserError`."""
    found: dict[str, SeatLimit] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if (match := _FORM.fullmatch(line)) is None:
            raise UserError(f"episode.seat_limits {line!r}: write {FORMS}; a seat is 1 to 128 letters, digits, '-' or '_'")
        seat, key, number = match.groups()
        limit = found.get(seat, SeatLimit(seat=seat))
        if getattr(limit, key) is not None:
            raise UserError(f"episode.seat_limits gives the seat {seat} two limits {key}; give it one")
        found[seat] = msgspec.structs.replace(limit, **{key: int(number)})
    return tuple(found.values())


def check_seat_limits(episode: EpisodeSettings) -> None:
    """Raise `UserError` for a limit of one seat that its episode's would make none of."""
    for limit in parse_seat_limits(episode.seat_limits):
        if limit.max_turns is not None and limit.max_turns > episode.max_turns:
            raise UserError(
                f"episode.seat_limits gives the seat {limit.seat} {limit.max_turns} turns, and all seats have "
                f"episode.max_turns = {episode.max_turns} together: raise that, or lower the seat's limit"
            )
