"""Seats: who acts in which context, what each is worth, and what of it is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fleetbus.core.algorithms.advantages import EPSILON
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.core.training.groups import Group
from fleetbus.core.training.rewarded_parts import has_no_signal, list_rewards
from fleetbus_schemas import ActionReference, ChatMessage, ContextChange, EpisodeFinished, EpisodeSeat, UntrainedTurn
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.episode.conclusion import TIMED_OUT, Conclusion, apply_verdict, describe_seats, grade_timeout
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats, SeatError, add_unseated
from fleetbus_workers.environment.validation import InvalidReturn, validate_return
from fleetbus_workers.learner.batch_metrics import compute_group_metrics
from fleetbus_workers.learner.batches import CreditPlan, compute_episode_advantages
from tests.unit.test_result_checks import action, finished

SHOWN = (ChatMessage(role="user", content="your move"),)
FIRST, SECOND = "first", "second"


def play(*moves: tuple[str, int]) -> EpisodeSeats:
    """Turns of seats in segments."""
    seats = EpisodeSeats(moves[0][0])
    for turn, (seat, segment) in enumerate(moves):
        seats.take(Step(messages=SHOWN, seat=seat))
        seats.append(turn, segment)
    return seats


def finish(name: str, rewards: Sequence[tuple[str, float | None]], *, reward: float = 0.0) -> EpisodeFinished:
    """Seats that played one turn after another, twice each."""
    count = len(rewards)
    seats = tuple(
        EpisodeSeat(name=seat, turns=(number, number + count), reward=value) for number, (seat, value) in enumerate(rewards)
    )
    turns = 2 * count
    return EpisodeFinished(
        episode_id=name,
        group_id="g",
        attempt=1,
        outcome="completed",
        worker="w",
        reward=reward,
        turns=turns,
        actions=tuple(ActionReference(sequence=turn + 1, lane="e0", turn=turn) for turn in range(turns)),
        turn_rewards=(0.0,) * turns,
        seats=seats,
    )


def gather(*results: EpisodeFinished) -> Group:
    return Group(group_id="g", size=len(results), results={result.episode_id: result for result in results})


def test_a_seat_begins_with_a_prompt_of_its_own_and_goes_on_where_it_last_acted() -> None:
    seats = play((FIRST, 0))
    assert seats.take(Step(messages=SHOWN)) is None, "an unnamed seat is the one before"
    assert seats.take(Step(messages=SHOWN, seat=SECOND)) == ContextChange(reason="seat")
    seats.append(1, 1)
    assert seats.take(Step(messages=SHOWN, seat=FIRST)) == ContextChange(resume=0)
    seats.append(2, 2)  # its context was compacted meanwhile
    seats.take(Step(messages=SHOWN, seat=SECOND))
    assert seats.take(Step(messages=SHOWN, seat=FIRST)) == ContextChange(resume=2)
    wanted = ContextChange(reason="history_edited")
    assert seats.take(Step(messages=SHOWN, seat=SECOND, context=wanted)) is wanted, "an environment may say how it goes on"


@pytest.mark.parametrize(
    ("seats", "step", "reason"),
    [
        (EpisodeSeats(""), Step(seat=SECOND, messages=SHOWN), "Start.seat names none"),
        (play((FIRST, 0)), Step(seat=SECOND), "Step.messages are empty"),
        (play((FIRST, 0), (SECOND, 1)), Step(messages=SHOWN, context=ContextChange(resume=0)), "it is first's"),
        (play((FIRST, 0)), Step(seat=SECOND, messages=SHOWN, context=ContextChange(keep_turns=1)), "one step does one of them"),
        (play(*((f"s{n}", n) for n in range(MAX_SEATS))), Step(seat="more", messages=SHOWN), f"{MAX_SEATS} have acted"),
    ],
)
def test_a_step_that_seats_as_it_may_not_is_refused_by_name(seats: EpisodeSeats, step: Step, reason: str) -> None:
    with pytest.raises(SeatError, match=reason):
        seats.take(step)


@pytest.mark.parametrize(
    ("kind", "value", "call"),
    [
        (Start, Start(messages=SHOWN, seat="a.b"), "reset"),
        (Step, Step(messages=SHOWN, seat="a b"), "step"),
        (Verdict, Verdict(reward=0.0, seats={"a>": 1.0}), "verify"),
        (Verdict, Verdict(reward=0.0, seats={"a": "1"}), "verify"),  # type: ignore[dict-item]
        (Verdict, Verdict(reward=0.0, seats=dict.fromkeys(map(str, range(MAX_SEATS + 1)), 0.0)), "verify"),
    ],
)
def test_names_and_rewards_of_seats_are_checked_where_they_come_in(kind: type, value: object, call: str) -> None:
    with pytest.raises(InvalidReturn, match="seat"):
        validate_return(kind, value, call)


def test_a_seat_without_a_reward_says_why_and_its_turns_are_not_trained() -> None:
    seats = play((FIRST, 0), (SECOND, 1), ("third", 2), (SECOND, 1), ("fourth", 3))
    described = seats.describe({FIRST: 1.0, SECOND: None, "third": math.nan, "never_acted": 1.0}, 0.5)
    assert described == (
        EpisodeSeat(name=FIRST, turns=(0,), reward=1.0),
        EpisodeSeat(name=SECOND, turns=(1, 3), reason="its verdict is None"),
        EpisodeSeat(name="third", turns=(2,), reason="its verdict is nan, which is no grade"),
        EpisodeSeat(name="fourth", turns=(4,), reason="Verdict.seats has no reward for it"),
    )
    assert add_unseated((), described) == tuple(UntrainedTurn(turn=turn, reason="seat") for turn in (1, 2, 3, 4))
    assert UNSEATED.describe({FIRST: 1.0}, 0.5) == UNSEATED.describe({}, 0.5) == ()


def test_where_the_verdict_names_no_seat_all_share_the_episodes_reward() -> None:
    seats = play((FIRST, 0), (SECOND, 1))
    shared = describe_seats(conclude(Verdict(reward=0.5), seats), seats)
    assert [(seat.name, seat.reward) for seat in shared] == [(FIRST, 0.5), (SECOND, 0.5)]


def test_a_judge_of_groups_grades_the_seats_that_share_the_episodes_reward() -> None:
    shared = play((FIRST, 0), (SECOND, 1)).describe({}, 0.0)
    judged = [replace(finish(name, [(FIRST, 0.0)], reward=reward), seats=shared) for name, reward in (("a", 1.0), ("b", 0.0))]
    assert list_rewards(judged[0]) == [(FIRST, 1.0), (SECOND, 1.0)]
    assert not has_no_signal(map(list_rewards, judged))


def conclude(verdict: Verdict, seats: EpisodeSeats) -> Conclusion:
    ended = Conclusion(outcome="completed")
    return apply_verdict(ended, verdict, seats=seats, location="kuhn.py:1 in verify", max_abs_reward=10.0)


def test_a_verdict_is_none_if_no_seat_has_a_reward_or_one_has_an_impossible_one() -> None:
    seats = play((FIRST, 0), (SECOND, 1))
    assert conclude(Verdict(reward=0.0, seats={FIRST: 1.0, SECOND: -1.0}), seats).outcome == "completed"
    none = conclude(Verdict(reward=0.0, seats={"third": 1.0}), seats)
    assert (none.outcome, none.error_class, none.reward) == ("verifier_unknown", "no_verdict", None)
    assert none.error == "no seat has a reward; of first: Verdict.seats has no reward for it"
    large = conclude(Verdict(reward=0.0, seats={FIRST: 1.0, SECOND: -11.0}), seats)
    assert (large.error_class, large.error) == ("reward_out_of_bounds", "the verdict of the seat second is -11")


def test_the_grade_of_a_time_out_is_that_of_each_seat_and_other_failures_have_none() -> None:
    seats = play((FIRST, 0), (SECOND, 1))
    timed_out = describe_seats(grade_timeout(TIMED_OUT, -1.0, 2), seats)
    assert [(seat.name, seat.reward) for seat in timed_out] == [(FIRST, -1.0), (SECOND, -1.0)]
    failed = describe_seats(Conclusion(outcome="env_failed"), seats)
    assert [(seat.reward, seat.reason) for seat in failed] == [(None, "env_failed")] * 2


def test_each_seat_is_compared_with_the_same_seat_of_its_group() -> None:
    group = gather(finish("a", [(FIRST, 3.0), (SECOND, -3.0)]), finish("b", [(FIRST, 1.0), (SECOND, -1.0)]))
    plan = CreditPlan(advantage_estimator="dr_grpo")
    assert compute_episode_advantages([group], plan) == [[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, -1.0, 1.0]]
    deviation = math.sqrt(2.0)
    normalised = compute_episode_advantages([group], CreditPlan(advantage_estimator="grpo"))
    assert normalised[0] == pytest.approx([1 / (deviation + EPSILON), -1 / (deviation + EPSILON)] * 2)


def test_seats_of_other_groups_and_other_names_are_no_siblings() -> None:
    groups = [
        gather(finish("a", [(FIRST, 1.0), (SECOND, 0.0)]), finish("b", [(FIRST, 0.0), ("third", 5.0)])),
        gather(finish("c", [(FIRST, 9.0)]), finish("d", [(FIRST, 7.0)])),
    ]
    plan = CreditPlan(advantage_estimator="dr_grpo")
    assert compute_episode_advantages(groups, plan) == [
        [0.5, 0.0, 0.5, 0.0],
        [-0.5, 0.0, -0.5, 0.0],
        [1.0, 1.0],
        [-1.0, -1.0],
    ]


def test_a_turns_reward_is_that_of_the_seat_that_acted() -> None:
    one = replace(finish("a", [(FIRST, 1.0), (SECOND, 2.0)]), turn_rewards=(0.25, 0.5, 0.75, 1.5))
    other = replace(finish("b", [(FIRST, 0.0), (SECOND, 0.0)]), turn_rewards=(0.0,) * 4)
    plan = CreditPlan(advantage_estimator="dr_grpo", credit_assignment="turn")
    assert compute_episode_advantages([gather(one, other)], plan) == [[0.5, 1.0, 0.375, 0.75], [-0.5, -1.0, -0.375, -0.75]]


def test_a_seat_without_a_reward_has_no_advantage_and_is_no_baseline() -> None:
    group = gather(
        finish("a", [(FIRST, 2.0), (SECOND, None)]),
        finish("b", [(FIRST, 0.0), (SECOND, 4.0)]),
        finish("c", [(FIRST, 1.0), (SECOND, 2.0)]),
    )
    advantages = compute_episode_advantages([group], CreditPlan(advantage_estimator="dr_grpo"))
    assert advantages == [[1.0, 0.0, 1.0, 0.0], [-1.0, 1.0, -1.0, 1.0], [0.0, -1.0, 0.0, -1.0]]


def test_a_group_of_a_game_whose_sum_is_zero_has_a_signal() -> None:
    equal = [finish("a", [(FIRST, 1.0), (SECOND, -1.0)]), finish("b", [(FIRST, 1.0), (SECOND, -1.0)])]
    other = [finish("a", [(FIRST, 1.0), (SECOND, -1.0)]), finish("b", [(FIRST, 1.0), (SECOND, -2.0)])]
    assert has_no_signal(map(list_rewards, equal))
    assert not has_no_signal(map(list_rewards, other))
    metrics = compute_group_metrics([gather(*other)], [0])
    assert (metrics["groups_without_signal"], metrics["reward_of_first"], metrics["reward_of_second"]) == (0, 1.0, -1.5)


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ([(FIRST, (0, 7))], "its seats have other turns than were played, or one turn twice"),
        ([(FIRST, (0, 1)), (SECOND, (1,))], "its seats have other turns than were played, or one turn twice"),
        ([(FIRST, ()), (FIRST, ())], f"its seats are not up to {MAX_SEATS} different names"),
        ([("\x1b[2J", ())], f"its seats are not up to {MAX_SEATS} different names"),
        ([(f"s{number}", ()) for number in range(MAX_SEATS + 1)], f"its seats are not up to {MAX_SEATS} different names"),
    ],
)
def test_a_result_whose_seats_are_forged_is_not_trained(seats: Sequence[tuple[str, tuple[int, ...]]], problem: str) -> None:
    forged = tuple(EpisodeSeat(name=name, turns=turns, reward=1.0) for name, turns in seats)
    assert find_actions_problem(replace(finish("a", [(FIRST, 1.0)]), seats=forged, actions=()), []) == problem


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ([EpisodeSeat(name=FIRST, turns=(0, 1))], "it trains turns of a seat without a reward"),
        ([EpisodeSeat(name=FIRST, turns=(0,), reward=1.0), EpisodeSeat(name=SECOND, turns=(1,))], "it trains turns of a seat"),
        ([EpisodeSeat(name=FIRST, turns=(1, 0), reward=1.0)], "not in their order"),
        ([EpisodeSeat(name=FIRST, turns=(0, 1), reward=1.0), EpisodeSeat(name=SECOND, turns=(), reward=9.0)], "no turns"),
        ([EpisodeSeat(name=FIRST, turns=(0, 1), reward=1.0)], ""),
    ],
)
def test_a_result_that_trains_or_orders_turns_of_its_seats_as_no_worker_does_is_not_trained(
    seats: Sequence[EpisodeSeat], problem: str
) -> None:
    found = find_actions_problem(finished(seats=tuple(seats)), [action(0), action(1)])
    assert problem in found if problem else not found


def test_an_episode_without_a_grade_has_no_turns_that_its_seats_would_have_to_leave_out() -> None:
    lost = finished(outcome="lost", reward=None, seats=(EpisodeSeat(name=FIRST, turns=(0, 1), reason="lost"),))
    assert not find_actions_problem(lost, [action(0), action(1)])
