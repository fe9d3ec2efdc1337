"""Token arrays as bytes are what NumPy reads and writes, and a history's hash depends on everything in it."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus_schemas.tokens import (
    EMPTY_HISTORY,
    TOKEN_BYTES,
    count_tokens,
    extend_history,
    pack_ids,
    pack_logprobs,
    pack_mask,
    unpack_ids,
    unpack_logprobs,
    unpack_mask,
)

relaxed = settings(deadline=None)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
LOGPROBS = st.lists(st.floats(width=32), max_size=40)
MASKS = st.lists(st.booleans(), max_size=70)


@relaxed
@given(IDS)
def test_ids_are_little_endian_u4_as_numpy_reads_them(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert packed == np.asarray(ids, dtype="<u4").tobytes()
    assert np.frombuffer(packed, "<u4").tolist() == ids
    assert unpack_ids(packed) == ids
    assert count_tokens(packed) == len(ids)


@relaxed
@given(LOGPROBS)
def test_logprobs_are_little_endian_f4_as_numpy_reads_them(logprobs: list[float]) -> None:
    packed = pack_logprobs(logprobs)
    np.testing.assert_array_equal(np.frombuffer(packed, "<f4"), np.asarray(logprobs, dtype="<f4"))
    np.testing.assert_array_equal(unpack_logprobs(packed), logprobs)
    assert count_tokens(packed) == len(logprobs)


@relaxed
@given(st.lists(st.floats(-1e30, 0), max_size=20))
def test_logprobs_in_double_precision_are_rounded_as_numpy_rounds_them(logprobs: list[float]) -> None:
    assert pack_logprobs(logprobs) == np.asarray(logprobs, dtype="<f4").tobytes()


@relaxed
@given(MASKS)
def test_masks_are_packed_bits_as_numpy_packs_them(mask: list[bool]) -> None:
    packed = pack_mask(mask)
    assert packed == np.packbits(np.asarray(mask, dtype=bool), bitorder="little").tobytes()
    assert unpack_mask(packed, len(mask)) == mask
    assert np.unpackbits(np.frombuffer(packed, np.uint8), count=len(mask), bitorder="little").astype(bool).tolist() == mask


def test_a_prefix_of_a_mask_can_be_unpacked_and_more_than_it_holds_cannot() -> None:
    packed = pack_mask([True, False, True])
    assert unpack_mask(packed, 2) == [True, False]
    with pytest.raises(IndexError):
        unpack_mask(packed, 9)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_bytes_that_hold_no_whole_number_of_tokens_are_refused(length: int) -> None:
    assert length % TOKEN_BYTES
    with pytest.raises(ValueError, match="not a multiple"):
        unpack_ids(b"\x00" * length)
    with pytest.raises(ValueError, match="not a multiple"):
        unpack_logprobs(b"\x00" * length)


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_an_id_outside_32_bits_is_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([1, wrong])


def history_of(turns: list[tuple[list[int], list[int]]]) -> bytes:
    history = EMPTY_HISTORY
    for prompt_delta, sampled in turns:
        history = extend_history(history, pack_ids(prompt_delta), pack_ids(sampled))
    return history


def test_a_history_hash_never_changes_its_value() -> None:
    first = extend_history(EMPTY_HISTORY, pack_ids([1, 2, 3]), pack_ids([4, 5]))
    assert first.hex() == "d8ee81146c31b0c26a4246805b2e07bd"
    assert extend_history(first, pack_ids([6]), pack_ids([7, 8])).hex() == "85b81214448fe220d807bb671978b1e5"


@relaxed
@given(st.binary(max_size=16), st.binary(max_size=24), st.binary(max_size=24))
def test_a_history_hash_is_blake2b_of_the_previous_one_the_length_and_the_ids(
    before: bytes, delta: bytes, sampled: bytes
) -> None:
    content = before + len(delta).to_bytes(8, "little") + delta + sampled
    assert extend_history(before, delta, sampled) == hashlib.blake2b(content, digest_size=16).digest()


TURNS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4
)


@relaxed
@given(TURNS, TURNS)
def test_two_histories_have_the_same_hash_only_if_they_are_the_same_turn_by_turn(
    one: list[tuple[list[int], list[int]]], other: list[tuple[list[int], list[int]]]
) -> None:
    assert (history_of(one) == history_of(other)) == (one == other)


def test_moving_a_token_between_turns_or_between_prompt_and_sample_changes_the_hash() -> None:
    arrangements: list[list[tuple[list[int], list[int]]]] = [
        [([1, 2], [3, 4])],
        [([1], [2, 3, 4])],
        [([1, 2, 3], [4])],
        [([1, 2, 3, 4], [])],
        [([], [1, 2, 3, 4])],
        [([1], [2]), ([3], [4])],
        [([1, 2], []), ([], [3, 4])],
        [([3], [4]), ([1], [2])],
        [([1, 2], [3, 4]), ([], [])],
        [],
    ]
    hashes = [history_of(turns) for turns in arrangements]
    assert len(set(hashes)) == len(hashes)


@relaxed
@given(TURNS)
def test_every_turn_changes_the_hash_and_none_is_empty_again(turns: list[tuple[list[int], list[int]]]) -> None:
    hashes = [history_of(turns[:count]) for count in range(len(turns) + 1)]
    assert all(before != after for before, after in pairwise(hashes))
    assert all(len(each) == 16 for each in hashes[1:])
