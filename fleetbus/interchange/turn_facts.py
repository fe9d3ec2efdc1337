"""The facts of a turn that fleetbus writes where a format has no field for them, read back from a foreign file."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.interchange.imported import ImportedTurn
from fleetbus_schemas import FinishReason, ShownImage, VersionSpan
from fleetbus_schemas.names import is_name


class TurnFacts(msgspec.Struct, kw_only=True):
    """See `ImportedTurn`; ``turn`` is None in another's file, and what is of another type is refused."""

    turn: int | None = None
    finish_reason: FinishReason = "stop"
    worker: str = ""
    seat: str = ""
    policy_versions: tuple[VersionSpan, ...] | None = None
    tool_call_errors: tuple[str, ...] = ()
    images: tuple[ShownImage, ...] = ()


def read_turn_facts(turn: ImportedTurn, facts: dict[str, Any], place: str) -> int | None:
    """Note in ``turn`` what ``facts`` say, and return its number. Raises `UserError` if they are not what fleetbus writes."""
    if not isinstance(facts.get("turn"), int):
        return None
    known = {name: facts[name] for name in TurnFacts.__struct_fields__ if name in facts}
    try:
        found = msgspec.convert(known, TurnFacts)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: what stands beside turn {facts['turn']} is not what fleetbus writes: {error}") from error
    turn.finish_reason, turn.worker, turn.versions = found.finish_reason, found.worker, found.policy_versions or ()
    turn.tool_call_errors, turn.images, turn.seat = found.tool_call_errors, found.images, found.seat
    if found.seat and not is_name(found.seat):
        raise UserError(f"{place}: the seat {found.seat!r:.100} of turn {found.turn} is no name")
    return found.turn
