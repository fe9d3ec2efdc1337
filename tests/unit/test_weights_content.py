"""Digest and finiteness in one pass: every kind of number, wherever a piece ends."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetbus_workers.weights import content
from fleetbus_workers.weights.content import CHECKED, ContentCheck, check_content, map_in_threads
from fleetbus_workers.weights.file import view_bytes

KINDS = [
    pytest.param("F64", torch.float64, torch.int64, id="F64"),
    pytest.param("F32", torch.float32, torch.int32, id="F32"),
    pytest.param("BF16", torch.bfloat16, torch.int16, id="BF16"),
    pytest.param("F16", torch.float16, torch.int16, id="F16"),
]


@pytest.mark.parametrize(("name", "dtype", "whole"), [kind for kind in KINDS if kind.id in ("BF16", "F16")])
def test_patterns_of_16_bits_are_judged_as_torch_judges_them(name: str, dtype: torch.dtype, whole: torch.dtype) -> None:
    infinities = torch.tensor([float("inf"), float("-inf")], dtype=dtype).view(whole).to(torch.int32)
    near = [int(pattern) + offset for pattern in infinities for offset in range(-9, 9)]
    patterns = torch.tensor([*range(0, 1 << 16, 251), *near], dtype=torch.int32).to(whole).view(dtype)
    found = [check_content(name, view_bytes(patterns[index : index + 1])).is_finite for index in range(len(patterns))]
    assert found == patterns.isfinite().tolist()


@pytest.mark.parametrize(("name", "dtype", "whole"), KINDS)
def test_the_ends_of_the_range_and_denormals_are_finite(name: str, dtype: torch.dtype, whole: torch.dtype) -> None:
    info = torch.finfo(dtype)
    denormal = torch.tensor([1], dtype=whole).view(dtype).item()
    for sign in (1.0, -1.0):
        numbers = torch.tensor([0.0, info.max, info.tiny, denormal], dtype=dtype) * sign
        assert check_content(name, view_bytes(numbers)).is_finite


@pytest.mark.parametrize(("name", "dtype", "whole"), KINDS)
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan", "-nan", "least nan", "least negative nan"])
@pytest.mark.parametrize("place", [0, 1000, -1])
def test_one_number_that_is_not_finite_is_found_among_others(
    name: str, dtype: torch.dtype, whole: torch.dtype, bad: str, place: int
) -> None:
    numbers = torch.randn(300_000).to(dtype)
    if bad.startswith("least"):  # infinity's pattern and one more
        infinity = torch.tensor([float("-inf" if "negative" in bad else "inf")], dtype=dtype)
        numbers[place] = (infinity.view(whole) + 1).view(dtype)[0]
    elif bad == "-nan":
        numbers[place : place + 1 or None] = torch.full((1,), float("nan"), dtype=dtype).neg()
    else:
        numbers[place] = float(bad)
    assert not numbers.isfinite().all()
    assert not check_content(name, view_bytes(numbers)).is_finite


@given(cuts=st.lists(st.integers(0, 5000), max_size=5), bad=st.booleans())
def test_pieces_make_the_same_as_the_whole(cuts: list[int], bad: bool) -> None:
    numbers = torch.arange(5000, dtype=torch.float32)
    numbers[4321] = float("nan") if bad else 0.0
    check, whole = ContentCheck("F32"), view_bytes(numbers)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 5000], strict=True):
        check.update(whole[4 * start : 4 * stop])
    assert check.sha256 == hashlib.sha256(whole).hexdigest() and check.is_finite is not bad


def test_whole_numbers_are_always_finite() -> None:
    for name in CHECKED - {"F64", "F32", "BF16", "F16"}:
        assert check_content(name, memoryview(b"\xff" * 64)).is_finite


def test_threads_keep_the_order_and_raise_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "count_processors", lambda: 8)
    assert map_in_threads(lambda item: item * 2, range(50)) == list(range(0, 100, 2))

    def fail(item: int) -> int:
        raise ValueError(str(item)) if item >= 7 else AssertionError

    monkeypatch.setattr(content, "MAX_THREADS", 3)
    with pytest.raises(ValueError, match=r"^7$"):
        map_in_threads(lambda item: item if item < 7 else fail(item), range(50))
