"""The hash of a whole history, worked out from its beginning: what workers carry along turn by turn."""

from __future__ import annotations

from collections.abc import Iterable

from fleetbus.core.episode.history import Turn
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history


def history_hash(turns: Iterable[Turn]) -> bytes:
    """Of a history without segments."""
    digest = EMPTY_HISTORY
    for turn in turns:
        shown = [image.object for image in turn.action.images]
        digest = extend_history(digest, turn.action.prompt_delta, turn.action.sampled, shown)
    return digest
