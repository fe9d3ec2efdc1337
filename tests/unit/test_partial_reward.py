"""Shares of a reward, read off what Fleet's verifiers print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.text.partial_reward import partial_reward
from fleetbus_workers.environment.adapters.fleet.grader import read_verdict


def marked(right: str | None, wrong: str | None) -> str:
    parts = []
    if right is not None:
        parts.append(f">>> SUCCESS_ACCUMULATOR >>>\n{right}\n<<< SUCCESS_ACCUMULATOR <<<")
    if wrong is not None:
        parts.append(f">>> ERROR_ACCUMULATOR >>>\n{wrong}\n<<< ERROR_ACCUMULATOR <<<")
    return "before\n" + "\n".join(parts) + "\nafter"


@pytest.mark.parametrize(
    ("output", "share"),
    [
        ("", None),
        ("nothing of the kind", None),
        (marked("['a', 'b', 'c']", "['d']"), 0.75),
        (marked("[]", "['d']"), 0.0),
        (marked(None, "['d', 'e']"), 0.0),
        (marked("['a']", None), 1.0),
        (marked("[]", "[]"), None),
        (marked("not a list", "['d']"), 0.0),
        (marked("__import__('os').getpid()", None), None),
        ("App mail: 1\nApp calendar: 0", 0.5),
        ("App mail: 1\nApp calendar: 1\nApp files: 0 two rows are missing", 2 / 3),
        ("App mail: 1 (no unexpected changes)\nApp calendar: 0", 0.0),
        ("App mail: 1 (no unexpected changes)", None),
        ("App mail: maybe", None),
    ],
)
def test_the_share_that_was_done(output: str, share: float | None) -> None:
    assert partial_reward(output) == share


@pytest.mark.integration
@given(st.text())
def test_any_output_gives_a_share_or_none(output: str) -> None:
    share = partial_reward(output)
    assert share is None or 0 <= share <= 1


@pytest.mark.parametrize(
    ("result", "partial", "reward"),
    [
        ({"score": 0, "partial": 0.25}, True, 0.25),
        ({"score": 0, "partial": 0.25}, False, 0.0),
        ({"score": 1, "partial": 0.25}, True, 1.0),
        ({"score": 0, "partial": 7}, True, 0.0),
        ({"score": 0, "partial": float("nan")}, True, 0.0),
        ({"score": 0, "partial": "1"}, True, 0.0),
        (0.0, True, 0.0),
    ],
)
def test_a_share_is_returned_beside_the_score_and_not_read_off_printed_text(
    result: object, partial: bool, reward: float
) -> None:
    answer = {"success": True, "result": result, "stdout": "App mail: 1 done"}
    assert read_verdict(answer, partial=partial).reward == reward
