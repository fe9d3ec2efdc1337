"""Advantages of groups as the learner hands them to the trainer: per episode or per turn, overlong episodes included."""

from __future__ import annotations

import msgspec
import pytest

from fleetbus.config.check import check_configuration
from fleetbus.config.settings import (
    AlgorithmSettings,
    Configuration,
    EpisodeSettings,
    LearnerSettings,
    TrainerSettings,
    WeightsSettings,
)
from fleetbus.core.training.groups import Group
from fleetbus.errors import UserError
from fleetbus_schemas import Action, ActionReference, EpisodeFinished, EpisodeSeat, Outcome, UntrainedTurn, VersionSpan
from fleetbus_schemas.action import FinishReason
from fleetbus_workers.learner.batches import CreditPlan, build_sequence, compute_episode_advantages


def finished(
    name: str,
    reward: float,
    *,
    turns: int = 2,
    turn_rewards: tuple[float, ...] = (),
    tokens: int = 8,
    outcome: Outcome = "completed",
) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=name,
        group_id="g",
        attempt=1,
        outcome=outcome,
        worker="w",
        reward=reward,
        turn_rewards=turn_rewards,
        tokens=tokens,
        loss_mask=bytes([0b11001100]),
        actions=tuple(ActionReference(sequence=index + 1, lane="e0", turn=index) for index in range(turns)),
    )


def grouped(*results: EpisodeFinished) -> list[Group]:
    return [Group(group_id="g", size=len(results), results={result.episode_id: result for result in results})]


def test_credit_per_episode_tells_all_turns_the_same() -> None:
    groups = grouped(finished("a", 1.0, turns=3), finished("b", 0.0, turns=1))

    assert compute_episode_advantages(groups, CreditPlan(advantage_estimator="dr_grpo")) == [[0.5] * 3, [-0.5]]


def test_credit_per_turn_adds_what_the_verdict_has_beyond_the_turns_to_the_last_one() -> None:
    """Both earned 1 in all: the first at once, the second by its verdict at the end."""
    groups = grouped(finished("a", 1.0, turn_rewards=(1.0, 0.0)), finished("b", 1.0, turn_rewards=(0.0, 0.0)))

    assert compute_episode_advantages(groups, CreditPlan(advantage_estimator="dr_grpo", credit_assignment="turn")) == [
        [0.0, -0.5],
        [0.0, 0.5],
    ]


def test_a_discount_makes_late_rewards_worth_less_at_the_first_turn() -> None:
    groups = grouped(finished("a", 1.0), finished("b", 0.0))

    plan = CreditPlan(advantage_estimator="dr_grpo", credit_assignment="turn", turn_discount=0.5)

    assert compute_episode_advantages(groups, plan) == [[0.25, 0.5], [-0.25, -0.5]]


def test_the_soft_punishment_of_overlong_episodes_enters_the_mean() -> None:
    groups = grouped(finished("a", 1.0, tokens=95), finished("b", 1.0, tokens=50))
    plan = CreditPlan(advantage_estimator="dr_grpo", overlong_limit=100, overlong_buffer=10, overlong_penalty_factor=1.0)

    assert compute_episode_advantages(groups, plan) == [[-0.25] * 2, [0.25] * 2]


def turn(index: int) -> Action:
    ids = b"".join(value.to_bytes(4, "little") for value in (5, 6))
    spans = (VersionSpan(version=3, start=0, stop=2),)
    return Action(
        episode_id="a", attempt=1, turn=index, text="", prompt_delta=ids, sampled=ids, logprobs=b"\0" * 8, versions=spans
    )


@pytest.mark.parametrize(("outcome", "trained"), [("completed", 4), ("truncated", 0)])
def test_overlong_filtering_takes_truncated_episodes_out_of_the_loss(outcome: Outcome, trained: int) -> None:
    result = finished("a", 1.0, outcome=outcome)

    sequence = build_sequence(result, [turn(0), turn(1)], [0.5, -0.5], CreditPlan(truncation_mask="outcome"), 1.0)

    assert int(sequence.loss_mask.sum()) == trained
    assert (sequence.versions == 3).sum() == trained
    if trained:
        assert sequence.advantages.tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -0.5, -0.5]
    else:
        assert not sequence.advantages.any()


@pytest.mark.parametrize("outcome", ["completed", "truncated"])
@pytest.mark.parametrize(("last", "trained"), [("stop", 4), ("length", 0)])
def test_a_filter_by_the_end_token_goes_by_the_last_response_and_not_by_the_outcome(
    outcome: Outcome, last: FinishReason, trained: int
) -> None:
    result = finished("a", 1.0, outcome=outcome)
    actions = [msgspec.structs.replace(turn(0), finish_reason="length"), msgspec.structs.replace(turn(1), finish_reason=last)]
    plan = CreditPlan(truncation_mask="no_end_token")
    assert int(build_sequence(result, actions, [0.5, -0.5], plan, 1.0).loss_mask.sum()) == trained


@pytest.mark.parametrize(("own", "trained"), [("stop", 2), ("length", 0)])
def test_the_last_response_is_the_last_of_a_seat_that_is_trained_here(own: FinishReason, trained: int) -> None:
    seats = (EpisodeSeat(name="mine", turns=(0,), reward=1.0), EpisodeSeat(name="theirs", turns=(1,), reason="elsewhere"))
    result = msgspec.structs.replace(finished("a", 1.0), seats=seats, untrained=(UntrainedTurn(turn=1, reason="seat"),))
    result = msgspec.structs.replace(result, loss_mask=bytes([0b00001100]))
    actions = [msgspec.structs.replace(turn(0), finish_reason=own), msgspec.structs.replace(turn(1), finish_reason="length")]
    plan = CreditPlan(truncation_mask="no_end_token")
    assert int(build_sequence(result, actions, [0.5, 0.0], plan, 1.0).loss_mask.sum()) == trained


def test_the_plan_is_read_off_the_configuration() -> None:
    configuration = Configuration(
        learner=LearnerSettings(advantage_estimator="rloo", min_group_size=3),
        episode=EpisodeSettings(max_episode_tokens=500),
        algorithm=AlgorithmSettings(mask_truncated_completions=True, overlong_buffer=50),
    )

    plan = CreditPlan.from_configuration(configuration)

    assert (
        plan.advantage_estimator,
        plan.minimum,
        plan.truncation_mask,
        plan.overlong_limit,
        plan.overlong_buffer,
    ) == (
        "rloo",
        3,
        "outcome",
        500,
        50,
    )


def test_credit_per_turn_refuses_estimators_that_have_no_form_for_it() -> None:
    configuration = Configuration(
        learner=LearnerSettings(advantage_estimator="maxrl"), algorithm=AlgorithmSettings(credit_assignment="turn")
    )

    with pytest.raises(UserError, match=r"algorithm\.credit_assignment = turn .* choose grpo, dr_grpo or gae"):
        check_configuration(configuration)


@pytest.mark.parametrize(
    ("configuration", "named"),
    [
        (Configuration(trainer=TrainerSettings(packing=True)), r"trainer\.token_budget"),
        (
            Configuration(algorithm=AlgorithmSettings(rollout_correction_low=3.0)),
            r"algorithm\.rollout_correction_low = 3\.0 exceeds",
        ),
        (Configuration(weights=WeightsSettings(store="bucket")), r"weights\.store = bucket: use folder, nats, or a URL"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_starts(configuration: Configuration, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_configuration(configuration)
