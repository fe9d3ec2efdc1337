"""A league: versions of the run's own policy that play a seat as its opponents. Pure.

The forms of ``SEAT=league:RULE`` are ``newest``, ``uniform:K`` and ``win_rate:K``: one of the last K published versions
(docs/decisions/0255-a-league-of-versions.md).
"""

from __future__ import annotations

import re
from typing import Literal, cast

import msgspec

from fleetbus.errors import UserError

LEAGUE = "league"
FORMS = "league:newest, league:uniform:K or league:win_rate:K"
MAX_SIZE = 256
"""Most versions that opponents are drawn from: each is kept as a file."""

SPARE_VERSIONS = 4
"""Further ones by number: what learners publish when they begin again is no other opponent, and what they do over is none."""

Rule = Literal["newest", "uniform", "win_rate"]

_FORM = re.compile(rf"{LEAGUE}:(?:(newest)|(uniform|win_rate):([1-9]\d{{0,3}}))")
_SLIP = re.compile(rf"(?i){LEAGUE}s?|({LEAGUE})?[\W_]*(newest|uniform|win[\W_]*rate)[\W_]*\d*|{LEAGUE}[\W_]*\d+")


class League(msgspec.Struct, frozen=True, kw_only=True):
    """An opponent is drawn by ``rule`` from the last ``size`` published versions."""

    rule: Rule
    size: int = 1

    @property
    def window(self) -> int:
        """The newest versions by number among which those are."""
        return self.size + SPARE_VERSIONS


def parse_league(seat: str, value: str) -> League | None:
    """The league that plays ``seat``; None for what is none. Raises `UserError`, also for what would be a policy's name and is
    hardly meant as one."""
    if not _SLIP.fullmatch(value) and not value.startswith(f"{LEAGUE}:"):
        return None
    found = _FORM.fullmatch(value)
    size = int(found[3] or 1) if found else 0
    if found is None or size > MAX_SIZE:
        raise UserError(f"run.seats: {seat}={value}: write {FORMS} behind the seat's name, with K from 1 to {MAX_SIZE}")
    return League(rule=cast(Rule, found[1] or found[2]), size=size)
