"""Groups that make a batch: too stale ones dropped, kept or waited for, groups without signal replaced, staleness split."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from fleetbus.core.episode.claim_seals import NOT_OF_CLAIM, without_verdict
from fleetbus.core.training.ledger import Ledger
from fleetbus_schemas import MAX_MESSAGE_BYTES, ActionReference, EpisodeFinished, Exclusion, Outcome, StepTrained, encode
from fleetbus_workers.learner import pool
from fleetbus_workers.learner.batch_metrics import compute_group_metrics
from fleetbus_workers.learner.pool import GroupPool


class World:
    """A pool whose groups are of two episodes, and who asked for them when."""

    def __init__(self, stale_groups: Literal["drop", "keep", "wait"], *, max_staleness: int = 1, replace_flat: int = 0) -> None:
        self.pool = GroupPool(
            Ledger(), minimum=2, max_staleness=max_staleness, stale_groups=stale_groups, replace_flat=replace_flat
        )
        self.pool.record_version(0, 0)
        self._position = 0

    def ask(self, *groups: str) -> None:
        for group in groups:
            self.pool.admit(group, 2)
            for index in range(2):
                self._position += 1
                self.pool.expect(f"{group}-{index}", group)
                self.pool.register_request(f"{group}-{index}", self._position)

    def finish(
        self,
        group: str,
        *,
        versions: tuple[int, ...] = (0,),
        rewards: tuple[float, float] = (0.0, 1.0),
        outcome: Outcome = "completed",
    ) -> None:
        for index, reward in enumerate(rewards):
            self.pool.add_result(
                EpisodeFinished(
                    episode_id=f"{group}-{index}",
                    group_id=group,
                    attempt=1,
                    outcome=outcome,
                    worker="w",
                    reward=reward,
                    request_sequence=index + 1,
                    actions=(ActionReference(sequence=1, lane="e0", turn=0),),
                    policy_versions=versions,
                ),
                sequence=10 + index,
            )

    def train(self, step: int, count: int = 1) -> list[str]:
        """One batch after ``step`` steps, if there is one, and the version that it makes."""
        groups = self.pool.take(count, step)
        if groups:
            self.pool.settle(groups)
            self.pool.record_version(step + 1, step + 1)
        return [group.group_id for group in groups]


def test_dropping_discards_what_is_beyond_the_bound_with_its_reason() -> None:
    world = World("drop")
    world.ask("slow", "a", "b")
    for step, group in enumerate(("a", "b")):
        world.finish(group)
        assert world.train(step) == [group]
    world.finish("slow")

    assert world.train(2) == []
    assert {exclusion.reason for exclusion in world.pool.take_exclusions()} == {"stale"}
    assert len(world.pool) == 0


def test_keeping_trains_it_and_the_measures_say_how_late_it_was() -> None:
    world = World("keep")
    world.ask("slow", "a", "b")
    for step, group in enumerate(("a", "b")):
        world.finish(group)
        assert world.train(step) == [group]
    world.finish("slow")
    (slow,) = world.pool.take(1, 2)

    measured = compute_group_metrics([slow], [world.pool.lag(slow, 2)], [world.pool.steps_queued(slow, 2)], max_staleness=1)

    assert measured["staleness_max"] == 2
    assert measured["groups_late"] == 1


def test_waiting_takes_no_batch_that_would_make_an_unfinished_group_late() -> None:
    world = World("wait")
    world.ask("slow", "a")
    world.finish("a")
    assert world.train(0) == ["a"], "the slow one may come one step later still"
    world.ask("b")
    world.finish("b", versions=(1,))
    assert world.train(1) == [], "now it may not"
    world.finish("slow")

    assert world.train(1) == ["slow"]


def test_waiting_never_lets_anything_be_late_whatever_the_order_of_arrival() -> None:
    world, step = World("wait", max_staleness=2), 0
    asked: dict[str, int] = {}
    unfinished: list[str] = []
    for number in range(40):
        while len(asked) - step < 3:  # the admission rule for batches of one
            group = f"g{len(asked):02d}"
            asked[group] = step
            unfinished.append(group)
            world.ask(group)
        group = unfinished.pop((7 * number) % len(unfinished))  # in no order
        world.finish(group, versions=(asked[group],))
        while trained := world.train(step):
            assert step - asked[trained[0]] <= 2
            step += 1
    assert step > 30
    assert not world.pool.take_exclusions()


def test_a_group_taken_over_counts_from_the_version_that_it_began_with() -> None:
    world = World("wait")
    world.pool.record_version(1, 1)
    world.pool.admit("old", 2, version=0)
    world.ask("new")
    world.finish("new", versions=(1,))

    assert world.train(1) == [], "the old one would be late in the next batch"


def test_groups_whose_rewards_are_equal_are_replaced_up_to_a_limit_per_batch() -> None:
    world = World("drop", replace_flat=2)
    world.ask("a", "b", "c", "d")
    for group in ("a", "b", "c"):
        world.finish(group, rewards=(1.0, 1.0))

    assert len(world.pool) == 2, "the third is kept, so that the run goes on"
    assert [exclusion.reason for exclusion in world.pool.take_exclusions()] == ["no_signal"] * 4
    assert world.train(0) == ["c"]
    world.finish("d", rewards=(0.0, 0.0), versions=(1,))
    assert len(world.pool) == 0, "every batch has its own limit"


def test_a_result_that_is_told_twice_is_judged_once() -> None:
    """As when a learner asks for what another asked for: it hears the result at once, and reads it again from the log."""
    world = World("drop", replace_flat=1)
    world.ask("a", "b", "c")
    world.finish("a", rewards=(1.0, 1.0))
    world.finish("c", rewards=(1.0, 1.0))
    world.finish("b")
    assert world.train(0) == ["b"], "the first is replaced, the third has to be trained, in the next batch"
    taken = world.pool.take(1, 1)
    world.finish("c", rewards=(1.0, 1.0))

    assert world.pool.settle(taken)[0] == ["c-0", "c-1"]


def test_a_result_that_was_read_back_without_its_verdict_is_excluded_as_one_that_was_followed() -> None:
    world = World("drop")
    world.ask("a")
    result = EpisodeFinished(episode_id="a-0", group_id="a", attempt=1, outcome="completed", worker="w", reward=1.0)
    world.pool.add_result(without_verdict(result), sequence=10)
    world.pool.add_result(msgspec.structs.replace(result, episode_id="a-1"), sequence=11, is_of_claim=False)
    assert [each.reason for each in world.pool.take_exclusions()] == [NOT_OF_CLAIM, NOT_OF_CLAIM]


def test_without_dynamic_sampling_such_groups_are_trained() -> None:
    world = World("drop")
    world.ask("a")
    world.finish("a", rewards=(1.0, 1.0))

    assert world.train(0) == ["a"]


def test_staleness_is_split_into_what_passed_in_flight_and_what_passed_in_the_queue() -> None:
    world = World("keep")
    world.ask("a")
    world.pool.record_version(1, 1)
    world.pool.record_version(2, 2)
    world.finish("a", versions=(0, 1))
    world.pool.record_version(3, 3)
    (group,) = world.pool.take(1, 3)

    measured = compute_group_metrics([group], [world.pool.lag(group, 3)], [world.pool.steps_queued(group, 3)])

    assert measured["staleness_mean"] == 3
    assert measured["staleness_in_flight_mean"] == 2
    assert measured["staleness_in_queue_mean"] == 1


@pytest.mark.parametrize("stale_groups", ["drop", "keep", "wait"])
def test_groups_that_are_in_time_are_trained_oldest_first_whatever_the_policy(
    stale_groups: Literal["drop", "keep", "wait"],
) -> None:
    world = World(stale_groups)
    world.ask("a")
    world.pool.record_version(1, 1)
    world.ask("b")
    world.finish("b", versions=(1,))
    world.finish("a", versions=(0,))

    assert [group.group_id for group in world.pool.take(2, 1)] == ["a", "b"]


def test_one_entry_tells_of_no_more_exclusions_than_it_holds_and_the_others_stay_unsettled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "EXCLUSIONS_PER_ENTRY", 3)
    world = World("drop")
    world.ask("a", "b", "c")
    for group in ("a", "b", "c"):
        world.finish(group)
    world.pool.discard_all("training_finished")
    ledger = world.pool._ledger
    told = [len(world.pool.take_exclusions()) for _ in range(3)]
    assert told == [2, 2, 2], "a group is told of by one entry: settled in part, nobody could go on with it"
    assert (ledger.open_ids, ledger.floor) == ((), 7)


def test_what_a_trained_group_leaves_out_is_told_of_by_the_entry_that_trains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "EXCLUSIONS_PER_ENTRY", 1)
    world = World("drop")
    world.ask("a", "b")
    for group in ("a", "b"):
        world.finish(group)
    taken = world.pool.take(2, 0)
    for unusable in taken:
        unusable.unusable[f"{unusable.group_id}-1"] = "image_missing"
    trained, excluded = world.pool.settle(taken)
    assert (trained, [each.episode_id for each in excluded]) == (["a-0", "b-0"], ["a-1", "b-1"])


def test_a_group_of_which_an_episode_was_settled_before_is_excluded_and_the_settled_one_is_left_alone() -> None:
    """As entries left groups that told of a part of one."""
    world = World("drop")
    world.ask("a")
    world.pool.record_settlement("a-1", "a")
    world.finish("a")
    assert world.pool.take_exclusions() == [Exclusion(episode_id="a-0", reason="group_cut")]
    assert len(world.pool) == 0


def test_a_full_entry_of_the_book_can_be_encoded() -> None:
    excluded = tuple(
        Exclusion(episode_id=f"g12345678-{index:06d}", reason="verifier_unknown") for index in range(pool.EXCLUSIONS_PER_ENTRY)
    )
    episodes = tuple(f"g12345678-{index:06d}" for index in range(4096))
    step = StepTrained(lineage="l1000", step=10**6, version=10**6, episodes=episodes, excluded=excluded)
    assert len(encode(step)) < MAX_MESSAGE_BYTES


def test_groups_that_fail_in_rounds_make_the_next_wait_until_one_can_be_used() -> None:
    world = World("drop")
    pauses = []
    for number in range(40):
        world.ask(f"g{number}")
        world.finish(f"g{number}", rewards=(float("nan"), 1.0), outcome="env_failed")
        pauses.append(world.pool.pause_seconds(4))
    assert pauses[:9] == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert pauses[-1] == pool.LONGEST_PAUSE_SECONDS
    world.ask("good")
    world.finish("good")
    assert world.pool.pause_seconds(4) == 0


def test_groups_whose_actions_cannot_be_trained_make_the_next_wait_though_they_were_graded() -> None:
    """As where an engine samples ids that the trainer does not know: each was asked for at once again, and nothing trained."""
    world = World("drop")
    pauses = []
    for number in range(12):
        world.ask(f"g{number}")
        world.finish(f"g{number}")
        (taken,) = world.pool.take(1, 0)
        taken.unusable |= dict.fromkeys(taken.results, "actions_broken")
        assert world.pool.discard_ungraded([taken]) == []
        pauses.append(world.pool.pause_seconds(4))
    assert pauses == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 4]
    world.ask("good")
    world.finish("good")
    world.pool.settle(world.pool.discard_ungraded(world.pool.take(1, 0)))
    assert world.pool.pause_seconds(4) == 0


def test_a_group_that_lost_all_its_episodes_before_training_is_discarded_for_their_reasons() -> None:
    world = World("drop")
    world.ask("a", "b")
    world.finish("a")
    world.finish("b")
    taken = world.pool.take(2, 0)
    for name in ("a-0", "a-1", "b-0"):
        next(group for group in taken if name in group.results).unusable[name] = "image_missing"
    left = world.pool.discard_ungraded(taken)
    assert [group.group_id for group in left] == ["b"]
    trained, excluded = world.pool.settle(left)
    assert trained == ["b-1"]
    assert sorted(excluded, key=lambda one: one.episode_id) == [
        Exclusion(episode_id=name, reason="image_missing") for name in ("a-0", "a-1", "b-0")
    ]
    assert len(world.pool) == 0
