"""Recorded turns as token histories that one forward pass can check, each history once. Pure.

Episodes of a group play one task, and a trained policy says the same most of the time: histories that equal others, or are the
beginning of others, leave a third of a default run's tokens to be scored.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import SegmentOrigin
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.turn_rules import compute_turn_seed
from fleetbus_workers.replay.recorded_episode import RecordedTurn

Ids = NDArray[np.int64]


class ExpectedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded turn whose tokens can be checked. ``request`` is what is known of its request beforehand (no ids, no stop
    tokens), ``ids`` are all tokens before the ``sampled`` ones."""

    request: GenerationRequest
    ids: Ids
    sampled: Ids


def find_expected_turns(turns: Sequence[RecordedTurn]) -> Iterator[tuple[RecordedTurn, ExpectedTurn]]:
    """The turns of one episode that one version sampled, each with all tokens before it, up to the first turn with images:
    from there the ids do not determine everything that the model is shown."""
    sequences: list[list[Ids]] = []
    for turn in turns:
        action = turn.action
        if action is None or action.images or action.finish_reason == "failed":
            return
        prompt, sampled = (np.frombuffer(packed, "<u4").astype(np.int64) for packed in (action.prompt_delta, action.sampled))
        if action.segment >= len(sequences):
            sequences.append(_begin_sequence(sequences, action.origin))
        history = sequences[min(action.segment, len(sequences) - 1)]
        history.append(prompt)
        before = np.concatenate(history)
        history.append(sampled)
        if len(action.versions) == 1 and len(sampled):
            request = GenerationRequest(
                cache_key=action.episode_id,
                ids=(),
                sampling=turn.observation.sampling,
                stop_ids=frozenset(),
                max_tokens=len(action.sampled),
                seed=compute_turn_seed(turn.observation),
                segment=action.segment,
            )
            yield turn, ExpectedTurn(request=request, ids=before, sampled=sampled)


def _begin_sequence(sequences: Sequence[Sequence[Ids]], origin: SegmentOrigin | None) -> list[Ids]:
    """The ids that a segment keeps of its parent."""
    if origin is None or not 0 <= origin.parent < len(sequences):
        return []
    return [np.concatenate(sequences[origin.parent])[: origin.kept]]


class History(msgspec.Struct, kw_only=True):
    """``ids`` of T tokens; ``mask`` [T] is True where one of ``turns`` sampled. ``ids`` begin with the tokens of every turn
    and all before them."""

    ids: Ids
    mask: NDArray[np.bool_]
    turns: list[ExpectedTurn]

    def find_places(self) -> NDArray[np.int64]:
        """For each sampled token of each turn, one turn after the other: its index among the masked tokens."""
        number = np.cumsum(self.mask) - 1
        return np.concatenate([number[len(turn.ids) : len(turn.ids) + len(turn.sampled)] for turn in self.turns])


def merge_histories(turns: Sequence[ExpectedTurn]) -> list[History]:
    """As few histories as hold all turns."""
    whole = [np.concatenate((turn.ids, turn.sampled)) for turn in turns]
    keyed = [(ids.astype(">u4").tobytes(), ids, turn) for ids, turn in zip(whole, turns, strict=True)]
    found: list[History] = []
    longer = b""
    # In reverse order, what begins with a history comes right before it.
    for key, ids, turn in sorted(keyed, key=lambda each: each[0], reverse=True):
        if not found or not longer.startswith(key):
            longer = key
            found.append(History(ids=ids, mask=np.zeros(len(ids), np.bool_), turns=[]))
        found[-1].mask[len(turn.ids) : len(turn.ids) + len(turn.sampled)] = True
        found[-1].turns.append(turn)
    return found
