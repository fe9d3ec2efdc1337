"""Detection of a missing signal: a collapse is distinguished from a healthy end, from a start, and from plain bad luck."""

from __future__ import annotations

import math
import random

import pytest

from fleetbus.core.training.learning_signal import MANY_GROUPS, LearningSignal, SignalDiagnosis
from fleetbus_schemas import LineageStarted, StepTrained
from fleetbus_schemas.training import Exclusion

SECOND = 1_000_000_000
GROUPS, SIZE = 16, 8


class Book:
    """Steps of ``groups`` groups, one per second."""

    def __init__(self) -> None:
        self.signal = LearningSignal()
        self.step = 0
        self.seconds = 0
        self.begin()

    def begin(self, parent_step: int = 0) -> None:
        self.step = parent_step
        self.signal.apply(LineageStarted(lineage=f"l{self.seconds}", worker="lea", parent_step=parent_step), self.now_ns)

    @property
    def now_ns(self) -> int:
        return self.seconds * SECOND

    def train(
        self,
        success: float,
        *,
        flat: int = GROUPS,
        advantage: float | None = 0.0,
        groups: int = GROUPS,
        replaced: int = 0,
        reward: float | None = None,
    ) -> SignalDiagnosis | None:
        self.step += 1
        self.seconds += 1
        metrics = {"success": success, "reward": success if reward is None else reward, "groups_without_signal": float(flat)}
        message = StepTrained(
            lineage="l",
            step=self.step,
            version=self.step,
            episodes=tuple(f"{self.step}-{number}" for number in range(groups * SIZE)),
            excluded=tuple(Exclusion(episode_id=f"x{number}", reason="no_signal") for number in range(replaced)),
            metrics=metrics | ({} if advantage is None else {"advantage_size_mean": advantage}),
        )
        self.signal.apply(message, self.now_ns)
        return self.signal.latest

    def disagree(self, *differences: float) -> SignalDiagnosis | None:
        """Steps that are healthy but for what sampler and trainer make of the same tokens."""
        for difference in differences:
            self.step += 1
            self.seconds += 1
            metrics = {"success": 0.5, "reward": 0.5, "advantage_size_mean": 0.5, "logprob_difference_mean": difference}
            self.signal.apply(
                StepTrained(lineage="l", step=self.step, version=self.step, episodes=(), metrics=metrics), self.now_ns
            )
        return self.signal.latest

    def learn(self, *successes: float) -> None:
        for success in successes:
            assert self.train(success, flat=4, advantage=0.5) is None


def test_a_policy_that_fell_is_told_with_how_far_how_fast_and_that_nothing_is_learned_any_more() -> None:
    book = Book()
    book.learn(0.2, 0.4, 0.6, 0.8, 0.8, 0.8)
    found = [book.train(success, flat=flat, advantage=size) for success, flat, size in ((0.4, 8, 0.3), (0.0, 16, 0.0))]
    assert found == [None, None], "one bad batch is no collapse"
    found = [book.train(0.0) for _ in range(4)]
    assert [each and each.kind for each in found] == [None, "fell", "no_signal", "no_signal"]
    last = found[-1]
    assert last is not None and last.kind == "no_signal"
    assert "success fell from 0.80 to 0.00 within 2 steps of step 6" in last.reason
    assert "no signal since step 8: the last 80 groups had equal rewards each (success 0.00, reward 0.00)" in last.reason
    assert "learner.max_grad_norm" in last.advice and last.since_ns == 8 * SECOND


def test_a_fall_is_told_while_there_is_still_some_signal() -> None:
    book = Book()
    book.learn(0.8, 0.8, 0.8)
    found = [book.train(0.01, flat=14, advantage=0.1) for _ in range(4)]
    assert found[0] is None and found[-1] is not None and found[-1].kind == "fell"
    assert found[-1].reason == "success fell from 0.80 to 0.01 within 1 step of step 3"
    book.train(0.3, flat=4, advantage=0.5)
    assert book.train(0.3, flat=4, advantage=0.5) is None, "it came back"


def test_a_run_that_never_had_a_success_is_told_and_what_may_be_done() -> None:
    book = Book()
    found = [book.train(0.0, reward=-1.0) for _ in range(4)]
    assert found[:3] == [None, None, None], "48 groups may be bad luck"
    assert found[3] is not None and found[3].kind == "no_signal" and found[3].since_ns == SECOND
    assert "no signal since step 1: the last 64 groups had equal rewards each (success 0.00, reward -1.00)" in found[3].reason
    assert "easier tasks" in found[3].advice and "verifier" in found[3].advice


def test_a_run_that_has_solved_its_tasks_is_at_its_end_and_not_in_trouble() -> None:
    book = Book()
    book.learn(0.5, 0.8, 0.95, 0.99)
    found = [book.train(1.0) for _ in range(6)]
    assert {each.kind for each in found if each} == {"solved"} and found[2] is None
    assert found[-1] is not None and "no more to learn since step 5" in found[-1].reason


def test_tasks_that_are_always_or_never_solved_leave_nothing_to_learn_either() -> None:
    book = Book()
    book.learn(0.5, 0.5, 0.5)
    found = [book.train(0.5) for _ in range(5)][-1]
    assert found is not None and found.kind == "no_signal" and "temperature" in found.advice


@pytest.mark.parametrize("seed", range(20))
def test_a_weak_policy_that_succeeds_now_and_then_is_left_alone(seed: int) -> None:
    chance = random.Random(seed)
    book = Book()
    for _ in range(60):
        won = [sum(chance.random() < 0.03 for _ in range(SIZE)) for _ in range(GROUPS)]
        flat = sum(each in (0, SIZE) for each in won)
        size = 0.0 if flat == GROUPS else 0.1
        assert book.train(sum(won) / GROUPS / SIZE, flat=flat, advantage=size) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_that_learns_in_small_noisy_batches_is_left_alone(seed: int) -> None:
    chance = random.Random(seed)
    book = Book()
    for number in range(400):
        skill = min(0.02 + number / 200, 0.9)
        won = [sum(chance.random() < skill for _ in range(SIZE)) for _ in range(2)]
        flat = sum(each in (0, SIZE) for each in won)
        found = book.train(sum(won) / 2 / SIZE, flat=flat, advantage=0.0 if flat == 2 else 0.3, groups=2)
        assert found is None, found


def test_equal_rewards_that_shaping_tells_apart_are_a_signal() -> None:
    book = Book()
    assert [book.train(0.0, flat=GROUPS, advantage=0.2) for _ in range(20)] == [None] * 20


def test_logs_that_say_nothing_of_advantages_are_not_judged() -> None:
    book = Book()
    assert [book.train(0.0, advantage=None) for _ in range(20)] == [None] * 20


def test_groups_that_were_replaced_are_counted_besides() -> None:
    book = Book()
    found = [book.train(0.0, replaced=1280) for _ in range(4)][-1]
    assert found is not None and "and 5120 episodes more were replaced for it" in found.reason


def test_batches_of_which_no_token_is_trained_are_told() -> None:
    book = Book()
    found = [book.train(0.2, flat=0) for _ in range(MANY_GROUPS)]
    assert found[-2] is None and found[-1] is not None
    assert "no token of its episodes counts" in found[-1].reason and "max_episode_tokens" in found[-1].advice


def test_one_batch_with_a_signal_begins_the_count_anew() -> None:
    book = Book()
    for _ in range(5):
        book.train(0.0)
    assert book.train(0.01, flat=15, advantage=0.01) is None
    assert [book.train(0.0) for _ in range(3)] == [None, None, None]


def test_what_a_lineage_that_was_cut_off_trained_is_forgotten() -> None:
    book = Book()
    book.learn(0.1, 0.1, 0.1, 0.9, 0.9, 0.9)
    for _ in range(5):
        last = book.train(0.0)
    assert last is not None and "fell from 0.90" in last.reason
    book.begin(parent_step=3)
    assert book.signal.latest is None
    found = [book.train(0.0) for _ in range(4)][-1]
    assert found is not None and "fell" not in found.reason, "the success of .9 is of a lineage that does not count"


def test_a_learner_that_goes_on_has_shown_nothing_yet() -> None:
    book = Book()
    for _ in range(5):
        book.train(0.0)
    book.begin(parent_step=book.step)
    assert book.signal.latest is None
    assert [book.train(0.0) is None for _ in range(4)] == [True, True, True, False]


def test_patience_counts_from_the_first_step_without_a_signal() -> None:
    book = Book()
    for _ in range(4):
        book.train(0.0)
    assert book.signal.diagnose(60 * SECOND, patience_seconds=60) is None
    assert book.signal.diagnose(61 * SECOND, patience_seconds=60) is not None


def test_a_fall_right_at_the_beginning_is_told_from_where_it_began() -> None:
    book = Book()
    book.learn(0.4, 0.5)
    found = [book.train(0.0) for _ in range(3)][-1]
    assert found is not None and found.reason == "success fell from 0.45 to 0.00 within 1 step of step 2"


def test_numbers_that_are_none_harm_nobody() -> None:
    book = Book()
    for _ in range(10):
        assert book.train(float("nan"), flat=float("nan"), advantage=float("nan")) is None  # type: ignore[arg-type]
    assert book.train(0.0, groups=0) is None


def test_sampler_and_trainer_that_disagree_in_every_step_are_said_with_the_remedy() -> None:
    book = Book()
    assert book.disagree(0.06, math.nan, 0.07) is None
    found = book.disagree(0.08)
    assert found is not None and found.kind == "mismatch" and found.since_ns == SECOND
    assert "since step 1" in found.reason and "0.080 on average" in found.reason and "inference.head_dtype" in found.advice
    assert book.disagree(0.026) is None
    book.begin(book.step)
    assert book.disagree(0.06, 0.06) is None
