"""Admission: never more groups out than can be consumed within the staleness bound, never more than the last step needs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.training.capacity import count_admissible_groups, lag


def admitted(step: int, *, outstanding: int, last_step: int = 100, batch: int = 4, max_staleness: int = 1) -> int:
    return count_admissible_groups(
        step=step, last_step=last_step, batch=batch, max_staleness=max_staleness, outstanding=outstanding
    )


def test_a_synchronous_run_admits_one_batch_at_a_time() -> None:
    assert admitted(0, outstanding=0, max_staleness=0) == 4
    assert admitted(0, outstanding=4, max_staleness=0) == 0


def test_staleness_lets_that_many_batches_more_be_out() -> None:
    assert admitted(0, outstanding=0, max_staleness=2) == 12
    assert admitted(5, outstanding=10, max_staleness=2) == 2


def test_the_last_steps_need_less() -> None:
    assert admitted(99, outstanding=0, max_staleness=3) == 4
    assert admitted(100, outstanding=0) == 0


def test_more_out_than_allowed_admits_nothing() -> None:
    """After a resume, requests of the lineage before are taken over beside one's own."""
    assert admitted(0, outstanding=50) == 0
    assert admitted(101, outstanding=3) == 0


def test_the_lag_is_counted_from_the_oldest_weights() -> None:
    assert lag(7, (5, 7, 6)) == 2
    assert lag(7, (7,)) == 0


def test_tokens_of_a_cut_lineage_ahead_and_no_tokens_at_all_have_no_lag() -> None:
    assert lag(3, (9,)) == 0
    assert lag(3, ()) == 0


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 12))
def test_what_is_admitted_is_trained_within_the_bound(batch: int, max_staleness: int, last_step: int) -> None:
    """Groups admitted at step s are consumed in order of admission, so a group waits at most max_staleness steps."""
    out: list[int] = []
    for step in range(last_step):
        out += [step] * admitted(step, outstanding=len(out), last_step=last_step, batch=batch, max_staleness=max_staleness)
        assert len(out) <= (max_staleness + 1) * batch
        assert len(out) >= batch, "a step could never be filled"
        consumed, out = out[:batch], out[batch:]
        assert all(step - admitted_at <= max_staleness for admitted_at in consumed)
    assert out == []
