"""The slots of a shared worker are divided by weight: fairly, without an idle one while somebody wants it, starving nobody."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.delivery.fair_shares import FairShares, Share

WEIGHTS = st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0, 7.0)), min_size=1, max_size=6)


class Bench:
    """Runs that have turns without end while they are busy, each in its own slot until it is told to end."""

    def __init__(self, slots: int, shares: Mapping[str, Share]) -> None:
        self.fair = FairShares(slots)
        self.slots = slots
        self.shares = dict(shares)
        self.busy = set(shares)
        self.held = Counter[str]()
        self.turns = Counter[str]()
        for run, share in shares.items():
            self.fair.add(run, share)

    def fill(self) -> None:
        able = [run for run in self.shares if run in self.busy and self.held[run] < (self.shares[run].quota or self.slots)]
        for run in self.shares:
            self.fair.update(run, held=self.held[run], wants_more=run in self.busy)
        while chosen := self.fair.choose(able):
            self.held[chosen] += 1
            self.turns[chosen] += 1
            assert self.held[chosen] <= (self.shares[chosen].quota or self.slots), "a quota is exceeded"
        assert self.held.total() <= self.slots

    def end_turn(self, chance: random.Random) -> None:
        self.held[chance.choice(list(self.held.elements()))] -= 1

    def play(self, turns: int, chance: random.Random) -> None:
        for _ in range(turns):
            self.fill()
            self.end_turn(chance)
        self.fill()


def by_name(weights: list[float], quota: int = 0) -> dict[str, Share]:
    return {f"r{number}": Share(weight=weight, quota=quota) for number, weight in enumerate(weights)}


@settings(max_examples=40)
@given(slots=st.integers(1, 64), weights=WEIGHTS, seed=st.integers(0, 99))
def test_under_saturation_each_run_holds_its_share_within_one_slot(slots: int, weights: list[float], seed: int) -> None:
    bench, chance = Bench(slots, by_name(weights)), random.Random(seed)
    bench.fill()
    for _ in range(50):
        for run, share in bench.shares.items():
            exact = slots * share.weight / sum(weights)
            assert abs(bench.held[run] - exact) < 1, (run, exact, bench.held)
        bench.end_turn(chance)
        bench.fill()


@settings(max_examples=40)
@given(slots=st.integers(1, 32), weights=WEIGHTS, quota=st.integers(0, 8), seed=st.integers(0, 99))
def test_no_slot_is_idle_while_a_run_wants_it(slots: int, weights: list[float], quota: int, seed: int) -> None:
    bench, chance = Bench(slots, by_name(weights, quota)), random.Random(seed)
    for _ in range(20):
        bench.busy = {run for run in bench.shares if chance.random() < 0.6}
        for _ in range(10):
            bench.fill()
            most = quota or slots
            wanted = sum(most for run in bench.shares if run in bench.busy)
            resting = sum(bench.held[run] for run in bench.shares if run not in bench.busy)
            assert bench.held.total() >= min(slots, wanted + resting)
            if bench.held.total():
                bench.end_turn(chance)


@settings(max_examples=40)
@given(
    slots=st.integers(1, 8),
    light=st.sampled_from((0.1, 0.5, 1.0)),
    heavy=st.sampled_from((1.0, 3.0, 10.0)),
    seed=st.integers(0, 99),
)
def test_nobody_starves_however_small_its_weight(slots: int, light: float, heavy: float, seed: int) -> None:
    bench, chance = Bench(slots, {"light": Share(weight=light), "heavy": Share(weight=heavy)}), random.Random(seed)
    waited = 0
    longest = (slots + 1) * (heavy / light + 2)
    for _ in range(int(1.5 * longest) + 1):
        before = bench.turns["light"]
        bench.fill()
        waited = 0 if bench.turns["light"] > before or bench.held["light"] else waited + 1
        assert waited <= longest
        bench.end_turn(chance)
    assert bench.turns["light"] >= 1


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
def test_turns_of_one_length_come_by_weight(slots: int) -> None:
    bench, chance = Bench(slots, {"a": Share(weight=3), "b": Share(weight=1)}), random.Random(1)
    bench.play(4000, chance)
    assert bench.turns["a"] / bench.turns["b"] == pytest.approx(3, rel=0.1)


def test_an_idle_runs_slots_are_used_and_given_back_one_by_one_as_they_become_free() -> None:
    bench, chance = Bench(16, {"a": Share(weight=3), "b": Share(weight=1)}), random.Random(1)
    bench.busy = {"b"}
    bench.fill()
    assert bench.held == {"b": 16}
    bench.busy = {"a", "b"}
    for freed in range(1, 13):
        bench.held["b"] -= 1
        bench.fill()
        assert bench.held["a"] == freed, "the next free slot is that of the run which woke"
    assert bench.held == {"a": 12, "b": 4}
    bench.play(100, chance)
    assert bench.held == {"a": 12, "b": 4}


def test_a_run_that_slept_has_no_turns_to_make_up_for() -> None:
    bench, chance = Bench(1, {"a": Share(), "b": Share()}), random.Random(1)
    bench.busy = {"a"}
    bench.play(1000, chance)
    bench.busy = {"a", "b"}
    before = bench.turns.copy()
    bench.play(100, chance)
    assert abs((bench.turns["b"] - before["b"]) - (bench.turns["a"] - before["a"])) <= 2


def test_a_quota_bounds_a_run_that_is_alone() -> None:
    bench = Bench(16, {"a": Share(quota=5), "b": Share()})
    bench.busy = {"a"}
    bench.fill()
    assert bench.held == {"a": 5}
    assert bench.fair.compute_targets(wanting="b") == {"a": 5.0, "b": 11.0}


def test_what_a_run_held_that_left_is_free() -> None:
    bench = Bench(4, {"a": Share(), "b": Share()})
    bench.fill()
    bench.fair.remove("a")
    del bench.shares["a"], bench.held["a"]
    bench.fill()
    assert bench.held == {"b": 4}
