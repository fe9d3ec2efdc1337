"""The next slot goes to whoever is due: the slots of a worker that serves several runs, divided by weight.

Pure: no clock, no I/O. Above it is `fleetbus.delivery.shared_slots`, which says what each run holds and if it wants more. While
all runs want more, each holds its weighted share of the slots within one slot; what one does not want is divided among the
others; a run whose share is less than a slot gets its turns by weight all the same, so that none starves
(docs/decisions/0223-an-inference-worker-for-several-runs.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

_ROUNDING = 1e-9
"""Of sums of shares, which are no whole numbers."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A run's part of a shared worker: ``weight`` beside those of the others, and at most ``quota`` slots (0: all)."""

    weight: float = 1.0
    quota: int = 0


class Claim(msgspec.Struct, kw_only=True):
    """One run's hold on the slots, asked deliveries included, and whether it wants more. ``turns`` are those that it was
    given, divided by its weight: where shares are no whole slots, the run with the fewest is next."""

    share: Share
    held: int = 0
    wants_more: bool = False
    turns: float = 0.0


class FairShares:
    """The claims of all runs on ``slots``, by name of the run."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._claims: dict[str, Claim] = {}

    def add(self, run: str, share: Share) -> None:
        """A run that begins has no turns to make up for."""
        self._claims[run] = Claim(share=share, turns=self._find_fewest_turns())

    def remove(self, run: str) -> None:
        """All that it still holds is free at once."""
        self._claims.pop(run, None)

    def update(self, run: str, *, held: int, wants_more: bool) -> None:
        """A run that wants nothing saves no turns up for later."""
        claim = self._claims[run]
        if wants_more and not claim.wants_more:
            claim.turns = max(claim.turns, self._find_fewest_turns())
        claim.held, claim.wants_more = held, wants_more

    def choose(self, able: Iterable[str]) -> str | None:
        """The run of those ``able`` to take a slot that gets the next one; None if no slot is free, or those that are free are
        the shares of runs which want more and take it soon. It counts as held from now on."""
        if sum(claim.held for claim in self._claims.values()) >= self.slots:
            return None
        targets = self.compute_targets()
        open_to = [run for run in able if self._claims[run].held < math.ceil(targets[run] - _ROUNDING)]
        if not open_to:
            return None
        chosen = min(
            open_to,
            key=lambda run: (
                self._claims[run].held >= math.floor(targets[run] + _ROUNDING),
                self._claims[run].turns,
            ),
        )
        claim = self._claims[chosen]
        claim.held += 1
        claim.turns += 1 / claim.share.weight
        return chosen

    def compute_targets(self, wanting: str = "") -> dict[str, float]:
        """The slots that each run may hold at the moment, not rounded: by weight, but none more than it wants or than its
        quota; what is left by some is divided among the others. ``wanting`` counts as one that wants more."""
        limits = {
            run: min(
                float(claim.share.quota or self.slots),
                math.inf if claim.wants_more or run == wanting else float(claim.held),
            )
            for run, claim in self._claims.items()
        }
        targets = dict.fromkeys(limits, 0.0)
        left, unfilled = float(self.slots), set(limits)
        while unfilled and left > _ROUNDING:
            each = left / sum(self._claims[run].share.weight for run in unfilled)
            full = {run for run in unfilled if limits[run] <= each * self._claims[run].share.weight}
            for run in full or unfilled:
                targets[run] = min(limits[run], each * self._claims[run].share.weight)
                left -= targets[run]
            unfilled -= full or unfilled
        return targets

    def sum_weights(self) -> float:
        return sum(claim.share.weight for claim in self._claims.values())

    def _find_fewest_turns(self) -> float:
        return min((claim.turns for claim in self._claims.values() if claim.wants_more), default=0.0)
