"""A learner that trains what another one asks for takes up each request once, whatever stands in the log twice."""

from __future__ import annotations

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.ledger import Ledger
from fleetbus_schemas import EpisodeRequested, FloorRaised, Message, SamplingSettings, SeatPolicy, Subjects, Task, encode
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.pool import GroupPool

SUBJECTS = Subjects("run")
POLICY, ASKING = "solver", "default"


def build() -> tuple[JoinedRequests, GroupPool]:
    pool = GroupPool(Ledger(), minimum=2, max_staleness=0, policy=POLICY)
    return JoinedRequests(pool, policy=POLICY, requested_by=ASKING, next_group=0, steps=4), pool


def stored(sequence: int, subject: str, message: Message) -> StreamEntry:
    return StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=0)


def request(sequence: int, group: int) -> StreamEntry:
    message = EpisodeRequested(
        episode_id=f"g{group:06d}-0",
        group_id=f"g{group:06d}",
        sample_index=0,
        group_size=1,
        split="train",
        task=Task(key="t"),
        policy=ASKING,
        sampling=SamplingSettings(),
        max_turns=2,
        max_tokens=64,
        deadline_ns=1,
        lineage="l1",
        seats=(SeatPolicy(seat="solver", policy=POLICY, trained=True),),
    )
    return stored(sequence, SUBJECTS.task("default", message.episode_id), message)


def test_a_copy_of_a_request_that_left_the_log_is_no_group_of_its_own() -> None:
    """A group that nobody plays would be counted as open for ever, and who asks would wait for it."""
    joined, pool = build()
    joined.enter(request(1, 7))
    assert pool.group_ids == ("g000007",)
    joined.enter(stored(5, SUBJECTS.floor, FloorRaised(sequence=4, groups={ASKING: 7, POLICY: 7})))
    joined.enter(request(6, 3))
    joined.enter(request(7, 8))
    assert pool.group_ids == ("g000007", "g000008")
    assert joined.next_group == 9


def test_the_floor_of_the_policy_that_asks_is_not_that_of_the_one_that_joins() -> None:
    joined, pool = build()
    joined.enter(stored(1, SUBJECTS.floor, FloorRaised(sequence=1, groups={ASKING: 7, POLICY: 3})))
    joined.enter(request(2, 2))
    joined.enter(request(3, 3))
    assert pool.group_ids == ("g000003",)
    assert SUBJECTS.floor in joined.list_subjects(SUBJECTS)
