"""A group of episodes: complete when all results are in, worth what its graded results are worth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.training.groups import Group
from fleetbus_schemas import ActionReference, EpisodeFinished, Exclusion, Outcome

OUTCOMES: tuple[Outcome, ...] = (
    "completed",
    "truncated",
    "env_failed",
    "verifier_unknown",
    "timeout",
    "lost",
    "cancelled",
    "stale",
)
ACTIONS = (ActionReference(sequence=5, lane="e0", turn=0),)


def result(
    episode: str,
    outcome: Outcome = "completed",
    *,
    reward: float | None = 1.0,
    actions: tuple[ActionReference, ...] = ACTIONS,
    versions: tuple[int, ...] = (3,),
) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=episode,
        group_id="g",
        attempt=1,
        outcome=outcome,
        worker="w",
        reward=reward,
        actions=actions,
        policy_versions=versions,
    )


def group_of(*results: EpisodeFinished, size: int = 0) -> Group:
    group = Group(group_id="g", size=size or len(results))
    for each in results:
        group.add(each)
    return group


def test_a_group_is_complete_when_as_many_results_are_in_as_were_requested() -> None:
    group = group_of(result("a"), size=2)
    assert not group.complete
    group.add(result("b", "env_failed", reward=None))
    assert group.complete


def test_a_second_result_of_an_episode_changes_nothing() -> None:
    group = group_of(result("a", reward=1.0), result("a", reward=0.0), size=2)
    assert not group.complete
    assert [each.reward for each in group.graded] == [1.0]


def test_graded_results_come_by_id_whatever_the_order_of_arrival() -> None:
    assert [each.episode_id for each in group_of(result("b"), result("c"), result("a")).graded] == ["a", "b", "c"]


def test_a_reward_of_zero_is_a_verdict() -> None:
    group = group_of(result("a", reward=0.0))
    assert [each.episode_id for each in group.graded] == ["a"]
    assert group.excluded == []


def test_infrastructure_outcomes_are_excluded_under_their_own_name() -> None:
    group = group_of(*(result(outcome, outcome, reward=None) for outcome in OUTCOMES[2:]))
    assert group.graded == []
    assert {each.episode_id: each.reason for each in group.excluded} == {outcome: outcome for outcome in OUTCOMES[2:]}


def test_a_reward_on_an_infrastructure_outcome_is_not_believed() -> None:
    assert group_of(result("a", "timeout", reward=1.0)).graded == []


def test_a_graded_outcome_without_reward_or_without_tokens_is_excluded() -> None:
    group = group_of(result("a", reward=None), result("b", "truncated", actions=()))
    assert group.graded == []
    assert group.excluded == [Exclusion(episode_id="a", reason="no_tokens"), Exclusion(episode_id="b", reason="no_tokens")]


def test_versions_are_those_of_graded_results() -> None:
    group = group_of(result("a", versions=(4, 3)), result("b", versions=(4,)), result("c", "lost", reward=None, versions=(1,)))
    assert group.versions == (3, 4)


def test_a_discarded_group_names_the_reason_for_what_was_graded_and_keeps_the_others_own() -> None:
    group = group_of(result("b"), result("a", "lost", reward=None))
    assert group.discard("stale") == [Exclusion(episode_id="b", reason="stale"), Exclusion(episode_id="a", reason="lost")]


results = st.lists(
    st.builds(
        result,
        st.integers(0, 6).map(str),
        st.sampled_from(OUTCOMES),
        reward=st.none() | st.just(0.0) | st.just(1.0),
        actions=st.sampled_from([ACTIONS, ()]),
    ),
    max_size=10,
)


@settings(deadline=None, max_examples=100)
@given(results)
def test_every_result_is_either_graded_or_excluded(arrived: list[EpisodeFinished]) -> None:
    group = group_of(*arrived, size=7)
    graded = {each.episode_id for each in group.graded}
    excluded = {each.episode_id for each in group.excluded}
    assert not graded & excluded
    assert graded | excluded == {each.episode_id for each in arrived} == {each.episode_id for each in group.discard("stale")}
    assert all(each.outcome in ("completed", "truncated") and each.reward is not None for each in group.graded)
