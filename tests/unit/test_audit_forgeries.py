"""Every imbalance that the audit knows, forged into a valid log: it is named with its ids, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fleetbus.core.audit.findings import KINDS
from fleetbus.core.episode.claim_seals import make_seal
from fleetbus_schemas import AttemptReleased, EpisodeSegment, FloorRaised, SegmentOrigin
from tests.support.forged_actions import (
    history_hash_of_garbage,
    history_hash_of_other_turns,
    logprobs_missing,
    logprobs_not_finite,
    versions_missing,
    versions_of_some_tokens,
)
from tests.support.forged_claims import (
    checkpoint_in_another_place,
    checkpoint_of_another_name,
    end_told_before_it,
    failed_episode_told_as_stale,
    fresh_episode_told_as_stale,
    graded_episode_told_as_failed,
    lineage_behind_what_the_log_has,
    rewards_that_no_score_explains,
    rewards_without_a_judge,
    rewards_without_scores,
    signal_told_as_none,
    version_in_another_place,
    version_of_another_name,
    whole_group_told_as_too_small,
)
from tests.support.forged_seats import FORGED_LIMITS, FORGED_SEATS, opponent_of_another_version
from tests.support.log_builder import SUBJECTS, LogBuilder, audit_log, kinds, start_log


def trained_twice(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["a"])
    log_builder.step(2, ["a"])


def trained_by_another_policy(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, [])
    log_builder.step(1, ["a"], policy="third")


def trained_and_excluded(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["a"])
    log_builder.step(2, [], {"a": "stale"})


def excluded_twice(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["innocent"], {"a": "stale"})
    log_builder.end(1, {"a": "training_finished"})


def excluded_without_reason(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, [], {"a": ""})


def trained_without_result(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.step(1, ["a"])


def trained_ungraded(log_builder: LogBuilder) -> None:
    log_builder.play("a", outcome="env_failed", reward=None)
    log_builder.step(1, ["a"])


def evaluation_settled(log_builder: LogBuilder) -> None:
    log_builder.play("a", split="eval")
    log_builder.step(1, ["a"])


def settled_never_requested(log_builder: LogBuilder) -> None:
    log_builder.step(1, [], {"a": "stale"})


def played_never_requested(log_builder: LogBuilder) -> None:
    log_builder.play("a", request=False)


def requested_twice(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.request("a", pool="other")


def second_result(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.finish("a", [])


def claim_after_result(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.claim("a", 2)


def claim_out_of_order(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", 1)
    log_builder.claim("a", 3)


def release_not_newest(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", 1)
    log_builder.claim("a", 2)
    log_builder.release("a", 1)


def release_after_result(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.release("a", 1)


def result_of_another_process(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", seal=make_seal("of the worker"))
    log_builder.observe("a", 0)
    log_builder.finish("a", [log_builder.act("a", 0)])


def result_with_the_secret_of_another_claim(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", seal=make_seal("of the worker"))
    log_builder.observe("a", 0)
    log_builder.finish("a", [log_builder.act("a", 0)], opens="of another")


def result_not_newest(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", 1)
    log_builder.observe("a", 0)
    action = log_builder.act("a", 0)
    log_builder.claim("a", 2, resumed=1)
    log_builder.finish("a", [action], attempt=1)


def observed_unclaimed(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.observe("a", 0)


def action_unobserved(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.act("a", 1)


def late_action_unobserved(log_builder: LogBuilder) -> None:
    log_builder.play("a", turns=1)
    log_builder.act("a", 1)


def action_repeated(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.act("a", 0)
    log_builder.act("a", 0)


def version_unpublished(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.act("a", 0, version=1)
    log_builder.version(1)


def version_repeated(log_builder: LogBuilder) -> None:
    log_builder.version(0)


def action_missing(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.act("a", 0)
    log_builder.finish("a", [2])


def actions_of_a_superseded_attempt(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a", 1)
    log_builder.observe("a", 0)
    action = log_builder.act("a", 0)
    log_builder.claim("a", 2, resumed=0)
    log_builder.finish("a", [action], attempt=2)


def loss_mask_length(log_builder: LogBuilder) -> None:
    log_builder.play("a", tokens=9)


def loss_mask_bytes(log_builder: LogBuilder) -> None:
    log_builder.play("a", loss_mask=b"\x18")


def segments_invented(log_builder: LogBuilder) -> None:
    first = EpisodeSegment(origin=None, first_turn=0, turns=1, tokens=4)
    origin = SegmentOrigin(parent=0, kept=2, reason="context_dropped")
    log_builder.play("a", segments=(first, EpisodeSegment(origin=origin, first_turn=1, turns=1, tokens=4)))


def loss_mask_unsampled(log_builder: LogBuilder) -> None:
    log_builder.play("a", turns=1, loss_mask=b"\x1c")


def reward_missing(log_builder: LogBuilder) -> None:
    log_builder.play("a", reward=None)


def reward_of_a_failure(log_builder: LogBuilder) -> None:
    log_builder.play("a", outcome="env_failed", reward=0.0)


def lineage_replaced(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.lineage("l2", parent="l1")
    log_builder.step(1, ["a"], lineage="l1")


def step_out_of_order(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(2, ["a"])


def misfiled(log_builder: LogBuilder) -> None:
    log_builder.add(SUBJECTS.episode("a"), AttemptReleased(episode_id="b", attempt=1, worker="w"))


def reward_infinite(log_builder: LogBuilder) -> None:
    log_builder.play("a", reward=math.inf)


def turn_reward_not_finite(log_builder: LogBuilder) -> None:
    log_builder.play("a", turn_rewards=(0.0, math.nan))


def wrong_group(log_builder: LogBuilder) -> None:
    log_builder.play("a", group_id="other")


def wrong_split(log_builder: LogBuilder) -> None:
    log_builder.request("b")
    log_builder.claim("b")
    log_builder.finish("b", [], split="eval")


def never_settled_below_the_floor(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["innocent"])
    log_builder.checkpoint(1, floor=len(log_builder.entries) + 1)


def floor_above_what_is_unsettled(log_builder: LogBuilder) -> None:
    log_builder.step(1, ["innocent"])
    log_builder.play("a")
    log_builder.add(SUBJECTS.floor, FloorRaised(sequence=len(log_builder.entries) + 1))


def settled_after_its_checkpoint(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["innocent"])
    log_builder.checkpoint(1, floor=len(log_builder.entries) + 1)
    log_builder.step(2, ["a"])


def unsettled_at_the_end(log_builder: LogBuilder) -> None:
    log_builder.play("a")
    log_builder.step(1, ["innocent"])
    log_builder.end(1, {})


def lineage_of_no_checkpoint(log_builder: LogBuilder) -> None:
    log_builder.step(1, ["innocent"])
    log_builder.lineage("l2", parent="l1", parent_step=1)


def lineage_anew_beside_a_checkpoint(log_builder: LogBuilder) -> None:
    log_builder.step(1, ["innocent"])
    log_builder.checkpoint(1)
    log_builder.lineage("l2", parent="l1", parent_step=0)


FORGERIES: list[tuple[Callable[[LogBuilder], None], str, str]] = [
    (trained_by_another_policy, "settled_elsewhere", "a-by-third"),
    (rewards_without_a_judge, "reward_unjudged", "a"),
    (rewards_that_no_score_explains, "reward_unjudged", "a"),
    (rewards_without_scores, "reward_unjudged", "a"),
    (fresh_episode_told_as_stale, "exclusion_unfounded", "a"),
    (graded_episode_told_as_failed, "exclusion_unfounded", "a"),
    (failed_episode_told_as_stale, "exclusion_unfounded", "a"),
    (whole_group_told_as_too_small, "exclusion_unfounded", "a b"),
    (signal_told_as_none, "exclusion_unfounded", "a b"),
    (end_told_before_it, "exclusion_unfounded", "a"),
    (version_of_another_name, "version_elsewhere", "default/1"),
    (version_in_another_place, "version_elsewhere", "default/2"),
    (checkpoint_in_another_place, "checkpoint_elsewhere", "l1/0"),
    (checkpoint_of_another_name, "checkpoint_elsewhere", "l1/0"),
    (lineage_behind_what_the_log_has, "steps_lost", "l1/2-4"),
    (trained_twice, "trained_twice", "a"),
    (trained_and_excluded, "trained_and_excluded", "a"),
    (excluded_twice, "excluded_twice", "a"),
    (excluded_without_reason, "excluded_without_reason", "a"),
    (trained_without_result, "trained_without_result", "a"),
    (trained_ungraded, "trained_without_result", "a"),
    (evaluation_settled, "evaluation_settled", "a"),
    (settled_never_requested, "never_requested", "a"),
    (played_never_requested, "never_requested", "a"),
    (requested_twice, "requested_twice", "a"),
    (second_result, "second_result", "a"),
    (claim_after_result, "claim_after_result", "a"),
    (claim_out_of_order, "claim_out_of_order", "a"),
    (release_not_newest, "release_not_newest", "a"),
    (release_after_result, "release_not_newest", "a"),
    (result_not_newest, "result_not_newest", "a"),
    (result_of_another_process, "result_not_of_claim", "a"),
    (result_with_the_secret_of_another_claim, "result_not_of_claim", "a"),
    (observed_unclaimed, "observed_unclaimed", "a"),
    (action_unobserved, "action_unobserved", "a"),
    (late_action_unobserved, "action_unobserved", "a"),
    (action_repeated, "action_repeated", "a"),
    (version_unpublished, "version_unpublished", "a"),
    (version_repeated, "version_repeated", "default/0"),
    (action_missing, "action_missing", "a"),
    (actions_of_a_superseded_attempt, "actions_not_history", "a"),
    (loss_mask_length, "loss_mask_length", "a"),
    (loss_mask_bytes, "loss_mask_length", "a"),
    (segments_invented, "segments_wrong", "a"),
    *((forge, "seats_wrong", "a") for forge in FORGED_SEATS),
    *((forge, "seat_limit_wrong", "a") for forge in FORGED_LIMITS),
    (opponent_of_another_version, "opponent_wrong", "a"),
    (loss_mask_unsampled, "loss_mask_unsampled", "a"),
    (reward_missing, "reward_not_of_outcome", "a"),
    (reward_of_a_failure, "reward_not_of_outcome", "a"),
    (lineage_replaced, "lineage_replaced", "l1/1"),
    (step_out_of_order, "step_out_of_order", "l1/2"),
    (misfiled, "misfiled", "a"),
    (history_hash_of_garbage, "history_hash_wrong", "a"),
    (history_hash_of_other_turns, "history_hash_wrong", "a"),
    (logprobs_missing, "logprobs_missing", "a"),
    (logprobs_not_finite, "logprobs_missing", "a"),
    (versions_missing, "versions_missing", "a"),
    (versions_of_some_tokens, "versions_missing", "a"),
    (reward_infinite, "reward_not_finite", "a"),
    (turn_reward_not_finite, "reward_not_finite", "a"),
    (wrong_group, "result_not_of_request", "a"),
    (wrong_split, "result_not_of_request", "b"),
    (never_settled_below_the_floor, "below_floor_unsettled", "a"),
    (floor_above_what_is_unsettled, "floor_unsettled", "a"),
    (settled_after_its_checkpoint, "below_floor_unsettled", "a"),
    (unsettled_at_the_end, "finished_unsettled", "a"),
    (lineage_of_no_checkpoint, "lineage_unfounded", "l2/1"),
    (lineage_anew_beside_a_checkpoint, "lineage_unfounded", "l2/0"),
]


@pytest.mark.parametrize(("forge", "kind", "offender"), FORGERIES, ids=[forge.__name__ for forge, _, _ in FORGERIES])
async def test_a_forged_imbalance_is_named_with_its_id(forge: Callable[[LogBuilder], None], kind: str, offender: str) -> None:
    log_builder = start_log()
    log_builder.play("innocent")
    forge(log_builder)
    report = await audit_log(log_builder)
    assert kinds(report).get(kind) == tuple(offender.split())
    assert not report.balanced
    assert all("innocent" not in ids for ids in kinds(report).values())


def test_every_kind_of_imbalance_is_forged() -> None:
    needs_a_hole = {"entries_missing", "entries_lost", "nothing_read", "torn", "log_erases", "checkpoints_ahead"}
    needs_a_deep_audit = {"digest_missing", "digest_wrong"}
    follows_from_another = {"books_open"}
    assert {kind for _, kind, _ in FORGERIES} | needs_a_hole | needs_a_deep_audit | follows_from_another == set(KINDS)


async def test_books_that_do_not_add_up_are_a_finding_of_their_own() -> None:
    log_builder = start_log()
    trained_twice(log_builder)
    report = await audit_log(log_builder)
    assert kinds(report)["books_open"] == ("1 requested, 2 accounted for",)
