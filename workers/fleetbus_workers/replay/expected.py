"""What a sampler was asked in a recording and what it answered: turns whose tokens can be checked without sampling. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import Action
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.observation_handler import compute_turn_seed
from fleetbus_workers.replay.story import Asked

Ids = NDArray[np.int64]


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded turn. ``request`` is what is known of it beforehand (no ids, no stop tokens), ``ids`` are all tokens before
    the ``sampled`` ones."""

    request: GenerationRequest
    ids: Ids
    sampled: Ids


class Scorer(Protocol):
    """Whoever checks the tokens of many turns together."""

    async def prepare(self, turns: Sequence[Expected]) -> None:
        """Look at these turns under the version that is loaded, before the worker is asked for them."""


def expected_turns(turns: Sequence[Asked]) -> Iterator[tuple[Asked, Expected]]:
    """The turns of one episode that one version sampled, each with all tokens before it. Those with images end it: their ids
    do not say everything that the model is shown."""
    history: list[Ids] = []
    for asked in turns:
        action = asked.action
        if action is None or action.images or action.finish_reason == "failed":
            return
        history.append(_ids(action.prompt_delta))
        before = np.concatenate(history)
        history.append(_ids(action.sampled))
        if len(action.versions) == 1 and len(history[-1]):
            yield asked, Expected(request=_request(asked, action), ids=before, sampled=history[-1])


def _request(asked: Asked, action: Action) -> GenerationRequest:
    return GenerationRequest(
        cache_key=action.episode_id,
        ids=(),
        sampling=asked.observation.sampling,
        stop_ids=frozenset(),
        max_tokens=len(action.sampled),
        seed=compute_turn_seed(asked.observation),
    )


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, dtype="<u4").astype(np.int64)
