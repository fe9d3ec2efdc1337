"""Settled requests, and what a checkpoint has to say so that nothing is trained twice or skipped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleetbus.core.training.ledger import Ledger


def test_an_empty_ledger_begins_at_its_floor() -> None:
    assert (Ledger().floor, Ledger(17).floor) == (1, 17)
    assert Ledger().settled_above == ()


def test_the_floor_is_the_lowest_open_request() -> None:
    ledger = Ledger()
    for episode, sequence in (("b", 20), ("a", 10), ("c", 30)):
        assert ledger.register(episode, sequence)
    assert ledger.floor == 10
    ledger.settle("a")
    assert ledger.floor == 20
    assert ledger.open_ids == ("b", "c")


def test_settled_requests_above_an_open_one_are_named() -> None:
    ledger = Ledger()
    for episode, sequence in (("a", 10), ("b", 20), ("c", 30)):
        ledger.register(episode, sequence)
    ledger.settle("c")
    ledger.settle("a")
    assert ledger.floor == 20
    assert ledger.settled_above == ("c",)


def test_with_nothing_open_the_floor_is_past_the_last_request() -> None:
    ledger = Ledger()
    ledger.register("a", 10)
    ledger.settle("a")
    assert ledger.floor == 11
    assert ledger.settled_above == ()


def test_a_request_is_entered_once() -> None:
    ledger = Ledger()
    assert ledger.register("a", 10)
    assert not ledger.register("a", 10)
    ledger.settle("a")
    assert not ledger.register("a", 10)


def test_a_request_that_a_checkpoint_settled_stays_settled() -> None:
    ledger = Ledger(10, ["b"])
    assert ledger.register("a", 10)
    assert not ledger.register("b", 20)
    assert ledger.settled_above == ("b",)
    with pytest.raises(ValueError, match="settled already"):
        ledger.settle("b")


def test_settling_twice_or_the_unknown_is_refused() -> None:
    ledger = Ledger()
    ledger.register("a", 10)
    ledger.settle("a")
    for episode in ("a", "never requested"):
        with pytest.raises(ValueError, match=episode):
            ledger.settle(episode)


@pytest.mark.parametrize(("told", "taken"), [(2**62, 9), (-5, 5), (6, 6), (9, 9)])
def test_a_result_moves_the_floor_only_between_what_was_known_and_its_own_position(told: int, taken: int) -> None:
    """A worker that lies would keep the log from being trimmed, or have it trimmed beyond open requests."""
    ledger = Ledger()
    ledger.register("before", 4)
    ledger.register_pending("e")
    assert ledger.register_result("e", told, 9) == taken
    assert not ledger.register("e", 6), "the answer to its own request comes later"
    ledger.settle("before")
    assert ledger.floor == taken
    ledger.settle("e")
    assert ledger.floor <= 10


def test_the_floor_does_not_pass_a_request_whose_answer_is_late() -> None:
    """It may stand in the log already, before requests that are settled by now."""
    ledger = Ledger()
    ledger.register("a", 10)
    ledger.register_pending("late")
    for episode, sequence in (("b", 20), ("c", 30)):
        ledger.register(episode, sequence)
    for episode in ("a", "b", "c"):
        ledger.settle(episode)
    assert ledger.floor == 11
    assert ledger.settled_above == ("b", "c")
    ledger.register("late", 15)
    assert ledger.floor == 15
    ledger.settle("late")
    assert ledger.floor == 31


def test_a_month_of_settled_requests_is_forgotten_and_none_of_them_comes_back() -> None:
    ledger = Ledger()
    for sequence in range(1, 2_001, 2):
        ledger.register(f"e{sequence}", sequence)
        ledger.settle(f"e{sequence}")
        ledger.forget_settled()
        assert len(ledger) == 0
    ledger.register("open", 2_000)
    assert ledger.floor == 2_000
    assert not ledger.register("e1", 1)
    assert ledger.open_ids == ("open",)


def test_what_is_settled_above_the_floor_is_not_forgotten() -> None:
    ledger = Ledger()
    for episode, sequence in (("a", 10), ("b", 20), ("c", 30)):
        ledger.register(episode, sequence)
    ledger.settle("a")
    ledger.settle("c")
    ledger.forget_settled()
    assert (ledger.floor, ledger.settled_above, len(ledger)) == (20, ("c",), 2)
    ledger.settle("b")
    ledger.forget_settled()
    assert (ledger.floor, ledger.settled_above, len(ledger)) == (31, (), 0)


class Resumes(RuleBasedStateMachine):
    """A log of requests, some settled, with crashes in between, against a model that simply remembers everything.

    The model knows all requests; the ledger, after a crash, only the floor and settled ids of its last checkpoint and what
    stands in the log from that floor on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, int] = {}
        self.settled: set[str] = set()
        self.ledger = Ledger()
        self.unanswered: dict[str, int] = {}
        self.end = 0

    @rule(gap=st.integers(1, 3))
    def store_without_an_answer(self, gap: int) -> None:
        self.end += gap
        episode = f"e{self.end}"
        self.log[episode] = self.unanswered[episode] = self.end
        self.ledger.register_pending(episode)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(sorted(self.unanswered)))
        assert self.ledger.register(episode, self.unanswered.pop(episode))

    @rule(gap=st.integers(1, 3))
    def request(self, gap: int) -> None:
        self.end += gap
        episode = f"e{self.end}"
        self.log[episode] = self.end
        assert self.ledger.register(episode, self.end)

    @precondition(lambda self: set(self.log) - self.settled - set(self.unanswered))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(sorted(set(self.log) - self.settled - set(self.unanswered))))
        self.settled.add(episode)
        self.ledger.settle(episode)

    @rule()
    def forget_settled(self) -> None:
        self.ledger.forget_settled()

    @rule()
    def crash_and_resume(self) -> None:
        floor, settled = self.ledger.floor, self.ledger.settled_above
        self.ledger = Ledger(floor, settled)
        self.unanswered.clear()
        for episode, sequence in self.log.items():
            if sequence >= floor:
                assert self.ledger.register(episode, sequence) == (episode not in self.settled)

    @invariant()
    def open_is_what_was_never_settled(self) -> None:
        assert set(self.ledger.open_ids) == set(self.log) - self.settled - set(self.unanswered)

    @invariant()
    def floor_and_settled_above_tell_all(self) -> None:
        floor = self.ledger.floor
        assert all(episode in self.settled for episode, sequence in self.log.items() if sequence < floor)
        above = {episode for episode, sequence in self.log.items() if sequence >= floor and episode in self.settled}
        assert set(self.ledger.settled_above) == above


TestResumes = Resumes.TestCase
TestResumes.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=10), st.data())
def test_the_floor_never_goes_back(sequences: list[int], data: st.DataObject) -> None:
    ledger = Ledger()
    for sequence in sequences:
        ledger.register(f"e{sequence}", sequence)
    floors = [ledger.floor]
    for sequence in data.draw(st.permutations(sequences)):
        ledger.settle(f"e{sequence}")
        floors.append(ledger.floor)
    assert floors == sorted(floors)
    assert floors[-1] == max(sequences) + 1
