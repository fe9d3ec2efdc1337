"""pass@k against enumeration, and what counts in a summary."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.training.evaluation_summary import pass_at, summarise_by_environment, summarise_results
from fleetbus_schemas import EpisodeFinished, Outcome


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_success(samples: int, data: st.DataObject) -> None:
    successes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    wins = [True] * successes + [False] * (samples - successes)
    choices = list(combinations(wins, k))

    assert pass_at(k, samples=samples, successes=successes) == pytest.approx(sum(map(any, choices)) / len(choices))


def played(
    task: str, reward: float | None, *, outcome: Outcome = "completed", env: str = "shop", version: int = 3
) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=f"{task}-{reward}-{outcome}",
        group_id=task,
        attempt=1,
        outcome=outcome,
        worker="w",
        split="eval",
        env=env,
        reward=reward,
        policy_versions=(version,),
    )


def test_a_summary_is_the_mean_over_tasks_of_pass_at_k() -> None:
    results = [played("a", 1.0), played("a", 0.0), played("b", 0.0), played("b", 0.2)]

    summary = summarise_results(results, [1, 2])

    assert (summary.tasks, summary.episodes, summary.graded) == (2, 4, 4)
    assert summary.pass_at == {"1": 0.25, "2": 0.5}
    assert summary.success == 0.25
    assert summary.mean_reward == pytest.approx(0.3)
    assert summary.versions == (3,)


def test_episodes_without_a_verdict_are_counted_beside_and_change_no_rate() -> None:
    results = [played("a", 1.0), played("a", None, outcome="env_failed"), played("b", None, outcome="timeout", version=9)]

    summary = summarise_results(results, [1, 2])

    assert summary.pass_at == {"1": 1.0}, "no task has two graded episodes"
    assert summary.not_graded == {"env_failed": 1, "timeout": 1}
    assert summary.versions == (3,)


def test_truncated_episodes_are_the_policys_own_failures() -> None:
    assert summarise_results([played("a", 0.0, outcome="truncated")], [1]).pass_at == {"1": 0.0}


def test_environments_are_told_apart() -> None:
    found = summarise_by_environment([played("a", 1.0, env="x"), played("b", 0.0, env="y")], [1])

    assert {env: summary.success for env, summary in found.items()} == {"x": 1.0, "y": 0.0}


def test_nothing_graded_is_zero_and_not_an_error() -> None:
    summary = summarise_results([], [1])

    assert (summary.success, summary.mean_reward, summary.pass_at) == (0.0, 0.0, {})
    assert math.isfinite(summary.success)
