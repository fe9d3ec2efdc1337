"""The books where the learners of two policies train the same episodes: what each settles, and what is forged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.groups import Group, has_tokens
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus.core.training.retention import Retention
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    FloorRaised,
    SeatPolicy,
    Task,
    TrainingFinished,
    decode,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.tokens import pack_mask
from tests.support.forged_seats import TOKENS, play_game
from tests.support.log_builder import PROMPT, SAMPLED, SUBJECTS, LogBuilder, audit_log, kinds, read_entries, start_log

SOLVER = "solver"
SEATS = (
    EpisodeSeat(name="first", turns=(0, 2), reward=1.0),
    EpisodeSeat(name="second", turns=(1,), reward=-1.0, policy=SOLVER, versions=(0,)),
)
REQUEST = EpisodeRequested(
    episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default", deadline_ns=1
)
ALL = pack_mask([*[False] * PROMPT, *[True] * SAMPLED] * 3)


def start_joint_log(**changes: Any) -> LogBuilder:
    log_builder = start_log()
    log_builder.lineage(policy=SOLVER)
    log_builder.version(policy=SOLVER)
    play_game(log_builder, other=SOLVER, is_trained=True, **{"seats": SEATS, "untrained": (), "loss_mask": ALL} | changes)
    return log_builder


async def test_an_episode_is_in_the_books_of_each_policy_that_trains_it() -> None:
    log_builder = start_joint_log()
    log_builder.step(1, ["a"])
    report = await audit_log(log_builder)
    assert (kinds(report), report.books.requested, report.books.trained, report.books.finished) == ({}, 2, 1, 1)
    log_builder.step(1, ["a"], policy=SOLVER)
    report = await audit_log(log_builder)
    assert (kinds(report), report.books.trained, report.books.in_flight) == ({}, 2, 0)
    assert report.trained_by == {"default": 1, SOLVER: 1}
    assert (report.outcomes, report.attempts.started) == ({"completed": 1}, 1)


async def test_one_policy_may_exclude_what_the_other_trains() -> None:
    log_builder = start_joint_log()
    log_builder.step(1, ["a"])
    log_builder.step(1, [], {"a": "no_tokens"}, policy=SOLVER)
    assert "exclusion_unfounded" in kinds(await audit_log(log_builder)), "it has a reward for its own seat"
    log_builder = start_joint_log(seats=(SEATS[0], EpisodeSeat(name="second", turns=(1,), reason="its verdict is None")))
    log_builder.step(1, ["a"])
    log_builder.step(1, [], {"a": "no_tokens"}, policy=SOLVER)
    assert "exclusion_unfounded" not in kinds(await audit_log(log_builder))


async def test_a_policy_without_a_seat_in_the_result_has_nothing_to_train() -> None:
    log_builder = start_joint_log(seats=())
    log_builder.step(1, ["a"])
    log_builder.step(1, [], {"a": "no_tokens"}, policy=SOLVER)
    assert "exclusion_unfounded" not in kinds(await audit_log(log_builder))
    (payload,) = (payload for subject, payload in log_builder.entries if b"EpisodeFinished" in payload)
    result = decode(EpisodeFinished, payload, subject="test")
    own = select_own_seats(result, SOLVER)
    group = Group(group_id=result.group_id, size=1)
    group.add(own)
    assert has_tokens(result)
    assert [(each.episode_id, each.reason) for each in group.excluded] == [("a", "no_tokens")]


def trained_twice_by_the_other(log_builder: LogBuilder) -> None:
    log_builder.step(1, ["a"], policy=SOLVER)
    log_builder.step(2, ["a"], policy=SOLVER)


def floor_above_what_the_other_has_not_settled(log_builder: LogBuilder) -> None:
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1)
    log_builder.add(SUBJECTS.floor, FloorRaised(sequence=len(log_builder.entries) + 1))


def settled_by_a_third(log_builder: LogBuilder) -> None:
    log_builder.step(1, [], {"a": "stale"}, policy="third")


@pytest.mark.parametrize(
    ("forge", "kind", "offender"),
    [
        (trained_twice_by_the_other, "trained_twice", "a@solver"),
        (floor_above_what_the_other_has_not_settled, "floor_unsettled", "a@solver"),
        (settled_by_a_third, "settled_elsewhere", "a-by-third"),
    ],
)
async def test_what_is_wrong_with_one_policy_is_named_with_it(
    forge: Callable[[LogBuilder], None], kind: str, offender: str
) -> None:
    log_builder = start_joint_log()
    forge(log_builder)
    assert kinds(await audit_log(log_builder)).get(kind) == (offender,)


@pytest.mark.parametrize("policy", ["", "default", "third"])
async def test_a_seat_that_names_another_policy_than_played_it_is_wrong(policy: str) -> None:
    log_builder = start_joint_log(seats=(SEATS[0], EpisodeSeat(name="second", turns=(1,), reward=-1.0, policy=policy)))
    assert kinds(await audit_log(log_builder)).get("seats_wrong") == ("a",)


def test_each_learner_sees_the_rewards_and_versions_of_its_own_seats() -> None:
    (payload,) = (payload for subject, payload in start_joint_log().entries if b"EpisodeFinished" in payload)
    result = decode(EpisodeFinished, payload, subject="test")
    own, other = select_own_seats(result, ""), select_own_seats(result, SOLVER)
    assert [seat.reward for seat in own.seats] == [1.0, None]
    assert [seat.reward for seat in other.seats] == [None, -1.0]
    assert (own.unrewarded_turns, other.unrewarded_turns) == ({1}, {0, 2})
    assert (own.policy_versions, other.policy_versions) == (result.policy_versions, (0,))
    assert result.tokens == 3 * TOKENS


def test_what_one_policy_has_settled_stays_in_the_log_until_the_other_has() -> None:
    log_builder = start_joint_log()
    for policy, is_settled in (("default", False), (SOLVER, True)):
        log_builder.step(1, ["a"], policy=policy)
        stored = CheckpointStored(lineage="l1", step=1, version=1, file="", floor=len(log_builder.entries))
        log_builder.add(SUBJECTS.train(policy), stored)
        retention = fold_retention(log_builder)
        assert retention.is_settled(SUBJECTS.episode("a")) == is_settled, policy
        assert bool(retention.list_settled(len(log_builder.entries), 9)) == is_settled


def fold_retention(log_builder: LogBuilder) -> Retention:
    return fold_entries(read_entries(log_builder))


def fold_entries(entries: Sequence[StreamEntry]) -> Retention:
    retention = Retention()
    for entry in entries:
        kind = entry.subject.split(".")[2]
        retention.enter(entry.sequence, entry.subject, decode_any(STORED[kind], entry.payload, subject=entry.subject))
    return retention


async def test_what_a_learner_that_joined_left_behind_when_it_finished_leaves_the_log() -> None:
    log_builder = start_joint_log()
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1, floor=len(log_builder.entries))
    assert not fold_retention(log_builder).is_settled(SUBJECTS.episode("a"))
    log_builder.add(SUBJECTS.train(SOLVER), TrainingFinished(lineage="l1", step=0, version=0))
    end = len(log_builder.entries)
    retention = fold_retention(log_builder)
    assert retention.is_settled(SUBJECTS.episode("a"))
    assert (retention.limit(end), retention.compute_floor(end).sequence) == (end, end + 1)
    log_builder.add(SUBJECTS.floor, FloorRaised(sequence=end + 1))
    assert kinds(await audit_log(log_builder)) == {}
    log_builder.lineage("l2", policy=SOLVER)
    assert not fold_retention(log_builder)._ended, "who begins again may need what the log still has"


def test_an_evaluation_of_the_policy_that_joined_leaves_the_log_once_it_has_a_result() -> None:
    log_builder = start_joint_log()
    log_builder.add(SUBJECTS.task("default", "e"), replace(REQUEST, episode_id="e", policy=SOLVER, lineage="", split="eval"))
    log_builder.claim("e")
    log_builder.finish("e", [], split="eval")
    assert fold_retention(log_builder).is_settled(SUBJECTS.episode("e"))


def test_an_end_counts_although_all_that_was_joined_before_it_has_left_the_log() -> None:
    log_builder = start_joint_log()
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1, floor=len(log_builder.entries))
    log_builder.add(SUBJECTS.train(SOLVER), TrainingFinished(lineage="l1", step=0, version=0))
    end = len(log_builder.entries)
    joined = (SeatPolicy(seat="second", policy=SOLVER, trained=True),)
    log_builder.add(SUBJECTS.task("default", "b"), replace(REQUEST, episode_id="b", lineage="l1", seats=joined))
    log_builder.step(2, ["b"])
    last = log_builder.checkpoint(2, floor=len(log_builder.entries))
    for begins in (1, end + 1):
        kept = [entry for entry in read_entries(log_builder) if entry.sequence >= begins or ".train." in entry.subject]
        retention = fold_entries(kept)
        assert retention.is_settled(SUBJECTS.episode("b")), begins
        assert retention.compute_floor(last).sequence == last + 1, begins


async def test_a_floor_that_was_raised_before_the_next_lineage_was_read_is_right() -> None:
    log_builder = start_joint_log()
    log_builder.step(1, ["a"])
    log_builder.checkpoint(1, floor=len(log_builder.entries))
    end = log_builder.add(SUBJECTS.train(SOLVER), TrainingFinished(lineage="l1", step=0, version=0))
    log_builder.lineage("l2", policy=SOLVER)
    log_builder.add(SUBJECTS.floor, FloorRaised(sequence=end + 1))
    assert kinds(await audit_log(log_builder)) == {}
