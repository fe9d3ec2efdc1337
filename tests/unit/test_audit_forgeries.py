"""Every imbalance that the audit knows, forged into a valid log: it is named with its ids, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleetbus.core.audit_findings import KINDS
from fleetbus_schemas import AttemptReleased
from tests.support.story import SUBJECTS, Story, audited, begun, kinds


def trained_twice(story: Story) -> None:
    story.play("a")
    story.step(1, ["a"])
    story.step(2, ["a"])


def trained_and_excluded(story: Story) -> None:
    story.play("a")
    story.step(1, ["a"])
    story.step(2, [], {"a": "stale"})


def excluded_twice(story: Story) -> None:
    story.play("a")
    story.step(1, [], {"a": "stale"})
    story.end(1, {"a": "training_finished"})


def excluded_without_reason(story: Story) -> None:
    story.play("a")
    story.step(1, [], {"a": ""})


def trained_without_result(story: Story) -> None:
    story.request("a")
    story.step(1, ["a"])


def trained_ungraded(story: Story) -> None:
    story.play("a", outcome="env_failed", reward=None)
    story.step(1, ["a"])


def evaluation_settled(story: Story) -> None:
    story.play("a", split="eval")
    story.step(1, ["a"])


def settled_never_requested(story: Story) -> None:
    story.step(1, [], {"a": "stale"})


def played_never_requested(story: Story) -> None:
    story.play("a", request=False)


def requested_twice(story: Story) -> None:
    story.request("a")
    story.request("a", pool="other")


def second_result(story: Story) -> None:
    story.play("a")
    story.finish("a", [])


def claim_after_result(story: Story) -> None:
    story.play("a")
    story.claim("a", 2)


def claim_out_of_order(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.claim("a", 3)


def release_not_newest(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.claim("a", 2)
    story.release("a", 1)


def result_not_newest(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.observe("a", 0)
    action = story.act("a", 0)
    story.claim("a", 2, resumed=1)
    story.finish("a", [action], attempt=1)


def observed_unclaimed(story: Story) -> None:
    story.request("a")
    story.observe("a", 0)


def action_unobserved(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 1)


def late_action_unobserved(story: Story) -> None:
    story.play("a", turns=1)
    story.act("a", 1)


def action_repeated(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0)
    story.act("a", 0)


def version_unpublished(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0, version=1)
    story.version(1)


def version_repeated(story: Story) -> None:
    story.version(0)


def action_missing(story: Story) -> None:
    story.request("a")
    story.claim("a")
    story.observe("a", 0)
    story.act("a", 0)
    story.finish("a", [2])


def actions_of_a_superseded_attempt(story: Story) -> None:
    story.request("a")
    story.claim("a", 1)
    story.observe("a", 0)
    action = story.act("a", 0)
    story.claim("a", 2, resumed=0)
    story.finish("a", [action], attempt=2)


def loss_mask_length(story: Story) -> None:
    story.play("a", tokens=9)


def loss_mask_bytes(story: Story) -> None:
    story.play("a", loss_mask=b"\x18")


def loss_mask_unsampled(story: Story) -> None:
    story.play("a", turns=1, loss_mask=b"\x1c")


def reward_missing(story: Story) -> None:
    story.play("a", reward=None)


def reward_of_a_failure(story: Story) -> None:
    story.play("a", outcome="env_failed", reward=0.0)


def lineage_replaced(story: Story) -> None:
    story.play("a")
    story.lineage("l2", parent="l1")
    story.step(1, ["a"], lineage="l1")


def step_out_of_order(story: Story) -> None:
    story.play("a")
    story.step(2, ["a"])


def misfiled(story: Story) -> None:
    story.add(SUBJECTS.episode("a"), AttemptReleased(episode_id="b", attempt=1, worker="w"))


FORGERIES: list[tuple[Callable[[Story], None], str, str]] = [
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
    (result_not_newest, "result_not_newest", "a"),
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
    (loss_mask_unsampled, "loss_mask_unsampled", "a"),
    (reward_missing, "reward_not_of_outcome", "a"),
    (reward_of_a_failure, "reward_not_of_outcome", "a"),
    (lineage_replaced, "lineage_replaced", "l1/1"),
    (step_out_of_order, "step_out_of_order", "l1/2"),
    (misfiled, "misfiled", "a"),
]


@pytest.mark.parametrize(("forge", "kind", "offender"), FORGERIES, ids=[forge.__name__ for forge, _, _ in FORGERIES])
async def test_a_forged_imbalance_is_named_with_its_id(forge: Callable[[Story], None], kind: str, offender: str) -> None:
    story = begun()
    story.play("innocent")
    forge(story)
    report = await audited(story)
    assert kinds(report).get(kind) == (offender,)
    assert not report.balanced
    assert all("innocent" not in ids for ids in kinds(report).values())


def test_every_kind_of_imbalance_is_forged() -> None:
    needs_a_hole = {"entries_missing"}
    follows_from_another = {"books_open"}
    assert {kind for _, kind, _ in FORGERIES} | needs_a_hole | follows_from_another == set(KINDS)


async def test_books_that_do_not_add_up_are_a_finding_of_their_own() -> None:
    story = begun()
    trained_twice(story)
    report = await audited(story)
    assert kinds(report)["books_open"] == ("1 requested, 2 accounted for",)
