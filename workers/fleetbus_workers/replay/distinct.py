"""Token histories that hold many turns: what equals another, or is how another begins, needs no pass of its own. Pure.

Episodes of a group play one task, and a policy that has learned it says the same most of the time: of a default run's tokens a
third has to be scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_workers.replay.expected import Expected, Ids


class History(msgspec.Struct, kw_only=True):
    """``ids`` of T tokens; ``mask`` [T] is True where one of ``turns`` sampled. Every turn's tokens, and all before them, are
    how ``ids`` begin."""

    ids: Ids
    mask: NDArray[np.bool_]
    turns: list[Expected]

    def places(self) -> NDArray[np.int64]:
        """For each sampled token of each turn, one turn after the other: which of the masked tokens it is."""
        number = np.cumsum(self.mask) - 1
        return np.concatenate([number[len(turn.ids) : len(turn.ids) + len(turn.sampled)] for turn in self.turns])


def distinct_histories(turns: Sequence[Expected]) -> list[History]:
    """As few histories as hold all turns."""
    spelled = [(np.concatenate((turn.ids, turn.sampled)).astype(">u4").tobytes(), turn) for turn in turns]
    found: list[History] = []
    longer = b""
    # Backwards, whatever begins with a history comes right before it.
    for history, turn in sorted(spelled, key=lambda each: each[0], reverse=True):
        if not found or not longer.startswith(history):
            longer = history
            ids = np.concatenate((turn.ids, turn.sampled))
            found.append(History(ids=ids, mask=np.zeros(len(ids), np.bool_), turns=[]))
        found[-1].mask[len(turn.ids) : len(turn.ids) + len(turn.sampled)] = True
        found[-1].turns.append(turn)
    return found
