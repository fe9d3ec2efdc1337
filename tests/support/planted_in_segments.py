"""Faults to plant into the trees of episodes. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import fleetbus_workers.environment.episode.policy_client as exchange
import fleetbus_workers.learner.batches as batches
from fleetbus_schemas import Action
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.leaves import Leaf, list_leaves, split_sequence


def token_trained_twice(patch: pytest.MonkeyPatch) -> None:
    """A segment that others leave is a leaf of its own and trained with the first of them, too."""

    def faulty(actions: Sequence[Action], unrewarded: frozenset[int]) -> tuple[Leaf, ...]:
        leaves = list_leaves(actions, unrewarded)
        return (*leaves, leaves[0]) if len(leaves) > 1 else leaves

    patch.setattr(batches, "list_leaves", faulty)


def leaf_lost_in_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """Of an episode that was taken over, segments that the attempts before had begun are left out."""

    def faulty(actions: Sequence[Action], unrewarded: frozenset[int]) -> tuple[Leaf, ...]:
        newest = actions[-1].attempt
        leaves = list_leaves(actions, unrewarded)
        own = [leaf for leaf in leaves if any(actions[turn].attempt == newest for turn in leaf.segment.turns)]
        return tuple(own) or leaves

    patch.setattr(batches, "list_leaves", faulty)


def reward_counted_per_leaf(patch: pytest.MonkeyPatch) -> None:
    def faulty(whole: TrainingSequence, leaves: Sequence[Leaf]) -> list[TrainingSequence]:
        rewarded = msgspec.structs.replace(whole, advantages=whole.advantages * len(leaves))
        return split_sequence(rewarded, leaves)

    patch.setattr(batches, "split_sequence", faulty)


def segment_begun_upon_its_own_hash(patch: pytest.MonkeyPatch) -> None:
    """A segment that leaves another is asked for upon the history of the last turn, whichever segment that was."""
    ask = exchange.PolicyClient.ask

    async def faulty(self: exchange.PolicyClient, *arguments: Any, **named: Any) -> Any:
        if self._history_hashes:
            newest = list(self._history_hashes.values())[-1]
            self._history_hashes = dict.fromkeys(self._history_hashes, newest)
        return await ask(self, *arguments, **named)

    patch.setattr(exchange.PolicyClient, "ask", faulty)
