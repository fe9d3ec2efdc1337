"""``--serve RUN[=WEIGHT[:QUOTA]]`` of a worker for several runs: whom it serves, and with which part of its slots. Pure."""

from __future__ import annotations

import math
import re

import msgspec

from fleetbus.errors import UserError

_FORM = re.compile(r"(?P<run>[^=]+)(=(?P<weight>[^:]+)(:(?P<quota>\d+))?)?")


class ServedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``run`` is a name, or a file with the run's settings; ``quota`` 0 means all slots."""

    run: str
    weight: float = 1.0
    quota: int = 0


def parse_served(text: str) -> ServedSpec:
    """One item. Raises `UserError`."""
    match = _FORM.fullmatch(text.strip())
    try:
        weight = float(match["weight"] or 1) if match else math.nan
    except ValueError:
        weight = math.nan
    if match is None or not (0.001 <= weight <= 1000):
        raise UserError(f"--serve {text!r}: give RUN, RUN=WEIGHT or RUN=WEIGHT:QUOTA with a weight between .001 and 1000")
    return ServedSpec(run=match["run"], weight=weight, quota=int(match["quota"] or 0))
