"""Rewards that no batch survives, from an environment, a verifier or a worker: the episode is excluded, the batch trained."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import trio.testing

from fleetbus.core.algorithms.advantages import ADVANTAGES, grpo
from fleetbus.core.training.ledger import Ledger
from fleetbus_schemas import ActionReference, EpisodeFinished
from fleetbus_workers.environment.base import Step, Verdict
from fleetbus_workers.learner.batches import CreditPlan, compute_episode_advantages
from fleetbus_workers.learner.pool import GroupPool
from tests.support.faulty_sessions import FaultyStages, make_returning, play_episode

HOSTILE = [1e308, -1e308, 1.7e308, 1e7, math.inf, -math.inf, math.nan]


def result(group: str, index: int, reward: float, turn_rewards: tuple[float, ...] = ()) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=f"{group}-{index}",
        group_id=group,
        attempt=1,
        outcome="completed",
        worker="w",
        reward=reward,
        turn_rewards=turn_rewards,
        turns=len(turn_rewards),
        request_sequence=index + 1,
        actions=(ActionReference(sequence=1, lane="e0", turn=0),),
        policy_versions=(0,),
    )


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("of_turns", [False, True])
@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_a_batch_is_trained_without_the_episodes_whose_rewards_are_out_of_bounds(
    hostile: float, of_turns: bool, estimator: Any
) -> None:
    pool = GroupPool(Ledger(), minimum=2, max_staleness=1)
    pool.record_version(0, 0)
    for group in ("a", "b"):
        pool.admit(group, 4)
        for index in range(4):
            pool.expect(f"{group}-{index}", group)
            pool.register_request(f"{group}-{index}", index + 1)
            is_hostile = group == "a" and index < 2
            reward = hostile if is_hostile and not of_turns else float(index % 2)
            pool.add_result(result(group, index, reward, (hostile,) if is_hostile and of_turns else (0.0,)), 9)
    groups = pool.take(2, 0)
    assert len(groups) == 2
    advantages = compute_episode_advantages(groups, CreditPlan(advantage_estimator=estimator))
    assert np.isfinite([value for each in advantages for value in each]).all()
    trained, excluded = pool.settle(groups)
    assert len(trained) == 6
    reason = "reward_not_finite" if not math.isfinite(hostile) else "reward_out_of_bounds"
    assert {(each.episode_id, each.reason) for each in excluded} == {("a-0", reason), ("a-1", reason)}


def test_two_such_rewards_would_spoil_all_advantages_of_their_group() -> None:
    with np.errstate(all="ignore"):
        assert not np.isfinite(grpo(np.array([1e308, 1e308, 0.0, 1.0]), np.zeros(4, dtype=int))).all()


@pytest.mark.parametrize("anyio_backend", [("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})], ids=["trio"])
@pytest.mark.parametrize("reward", [1e308, -1e308, 1e7])
async def test_a_worker_gives_no_grade_for_such_a_step_or_verdict(reward: float) -> None:
    stepped = await play_episode(FaultyStages(step=make_returning(Step(reward=reward))))
    judged = await play_episode(FaultyStages(verify=make_returning(Verdict(reward=reward))))
    for finished in (stepped, judged):
        assert (finished.outcome, finished.error_class) == ("verifier_unknown", "reward_out_of_bounds")
        assert finished.reward is None and all(abs(each) <= 1e6 for each in finished.turn_rewards)
