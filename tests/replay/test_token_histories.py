"""Histories that equal others, or begin them, are scored with them, and every turn finds its own tokens there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.replay.token_histories import ExpectedTurn, merge_histories


def turn(ids: list[int], sampled: list[int], seed: int = 0) -> ExpectedTurn:
    request = GenerationRequest(
        cache_key=f"{seed}", ids=(), sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=9, seed=seed
    )
    return ExpectedTurn(request=request, ids=np.array(ids, np.int64), sampled=np.array(sampled, np.int64))


def test_equal_histories_and_beginnings_of_others_stand_in_one() -> None:
    whole, same, begins = turn([1, 2, 3, 4], [5, 6], 1), turn([1, 2, 3, 4], [5, 6], 2), turn([1, 2], [3], 3)
    (history,) = merge_histories([begins, whole, same])
    assert history.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert history.mask.tolist() == [False, False, True, False, True, True]
    assert sorted(each.request.seed for each in history.turns) == [1, 2, 3]


def test_histories_that_part_stand_alone() -> None:
    assert len(merge_histories([turn([1, 2], [3]), turn([1, 2], [4]), turn([1], [2, 5])])) == 3
    assert merge_histories([]) == []


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@pytest.mark.integration
@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=12))
def test_every_turn_finds_its_tokens_and_no_history_begins_another(given_turns: list[tuple[list[int], list[int]]]) -> None:
    turns = [turn(ids, sampled, seed) for seed, (ids, sampled) in enumerate(given_turns)]
    histories = merge_histories(turns)
    assert sorted(each.request.seed for history in histories for each in history.turns) == list(range(len(turns)))
    for history in histories:
        masked, places = history.ids[history.mask], history.find_places().tolist()
        for each in history.turns:
            here = [places.pop(0) for _ in each.sampled]
            assert masked[here].tolist() == each.sampled.tolist()
            assert history.ids[: len(each.ids)].tolist() == each.ids.tolist()
        assert places == []
    spelled = [history.ids.astype(">u4").tobytes() for history in histories]
    assert not any(one is not other and one.startswith(other) for one in spelled for other in spelled)
