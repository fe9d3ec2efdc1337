"""Entries that leave the log for good, the numbers that refuse them afterwards, and those that stay however old they are."""

from __future__ import annotations

import pytest

from fleetbus.core.training.floor import NO_FLOOR, merge_floors, refuses_delivery, refuses_request
from fleetbus.core.training.lineage import complete_lineages, compute_surviving_steps
from fleetbus.core.training.retention import KEPT_CHECKPOINTS, Retention, SessionRetention
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    FloorRaised,
    LineageStarted,
    Message,
    PolicyPublished,
    Split,
    StepTrained,
    Subjects,
    Task,
)

S = Subjects("run")


def make_request(episode: str, *, group: str = "", split: Split = "train", earliest: int = 0) -> EpisodeRequested:
    return EpisodeRequested(
        episode_id=episode, group_id=group or episode.rpartition("-")[0], sample_index=0, split=split, task=Task(key="t"),
        policy="p", deadline_ns=1, lineage="l1", earliest_sequence=earliest,
    )  # fmt: skip


class Log:
    def __init__(self) -> None:
        self.retention = Retention()
        self.last = 0
        self.enter(S.train("p"), LineageStarted(lineage="l1", worker="w"))

    def enter(self, subject: str, message: Message | None = None) -> int:
        self.last += 1
        self.retention.enter(self.last, subject, message)
        return self.last

    def request(self, episode: str, **options: object) -> int:
        return self.enter(S.task("default", episode), make_request(episode, **options))  # type: ignore[arg-type]

    def settle(self, step: int, *episodes: str, first_open: int) -> int:
        self.enter(S.train("p"), StepTrained(lineage="l1", step=step, version=step, episodes=episodes))
        stored = CheckpointStored(lineage="l1", step=step, version=step, file="f", floor=1, first_open_group=first_open)
        return self.enter(S.train("p"), stored)

    @property
    def floor(self) -> FloorRaised:
        return self.retention.compute_floor(self.last)


def test_whole_groups_leave_below_the_first_that_may_be_asked_for_again() -> None:
    log = Log()
    log.request("g000000-0")
    second = log.request("g000001-0")
    log.settle(1, "g000000-0", first_open=1)
    assert log.floor == FloorRaised(sequence=second, groups={"p": 1})
    log.settle(2, "g000001-0", first_open=2)
    assert log.floor == FloorRaised(sequence=log.last + 1, groups={"p": 2})


def test_a_group_that_a_learner_may_still_fill_up_keeps_its_settled_episodes_and_all_behind_them() -> None:
    log = Log()
    first = log.request("g000001-0")
    log.request("g000000-0")
    log.settle(1, "g000001-0", "g000000-0", first_open=1)
    assert log.floor == FloorRaised(sequence=first, groups={"p": 1})


def test_without_a_checkpoint_that_says_so_no_group_leaves() -> None:
    log = Log()
    requested = log.request("g000000-0")
    log.settle(1, "g000000-0", first_open=0)
    assert log.floor == FloorRaised(sequence=requested, groups={"p": 0})


def test_the_floor_stays_below_the_number_of_an_open_evaluation_and_never_sinks() -> None:
    log = Log()
    log.enter(S.life("learner", "w"))
    log.request("l1-start-0", split="eval", earliest=2)
    assert log.floor.sequence == 2
    result = EpisodeFinished(episode_id="l1-start-0", group_id="l1-start", attempt=1, outcome="lost", worker="w")
    log.enter(S.episode("l1-start-0"), result)
    log.enter(S.floor, log.floor)
    reached = log.floor.sequence
    log.request("l1-late-0", split="eval", earliest=1)
    assert reached > 1
    assert log.floor.sequence >= reached
    assert log.retention.is_settled(S.episode("l1-late-0"))


def test_what_a_lineage_voids_before_the_floor_has_passed_it_is_open_again() -> None:
    """A checkpoint is damaged after it settled episodes, and before what it settled has left."""
    log = Log()
    log.request("g000000-0")
    log.settle(1, "g000000-0", first_open=1)
    second = log.request("g000001-0")
    log.settle(2, "g000001-0", first_open=2)
    assert log.floor.groups == {"p": 2}
    log.enter(S.train("p"), LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=1))
    assert log.floor == FloorRaised(sequence=second, groups={"p": 1})
    assert not log.retention.is_settled(S.action("e0", "g000001-0"))


def test_what_the_stored_floor_has_passed_stays_settled_whatever_a_lineage_voids() -> None:
    log = Log()
    log.request("g000000-0")
    log.settle(1, "g000000-0", first_open=1)
    log.enter(S.floor, log.floor)
    log.enter(S.train("p"), LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=0))
    assert len(log.retention) == 0
    assert log.floor == FloorRaised(sequence=log.last + 1, groups={"p": 1})


@pytest.mark.parametrize(
    ("request_message", "refused"),
    [
        (make_request("g000004-0"), True),
        (make_request("g000005-0"), False),
        (make_request("l1-start-0", split="eval", earliest=99), True),
        (make_request("l1-start-0", split="eval", earliest=100), False),
        (make_request("l1-start-0", split="eval"), False),
    ],
    ids=["settled group", "open group", "late request", "request in time", "request of a client that gives no position"],
)
def test_requests_are_refused_by_their_number(request_message: EpisodeRequested, refused: bool) -> None:
    floor = FloorRaised(sequence=100, groups={"p": 5})
    assert refuses_request(floor, request_message) is refused
    assert refuses_delivery(floor, request_message, 200) is refused
    assert refuses_delivery(floor, request_message, 99)
    assert not refuses_request(NO_FLOOR, request_message)


def test_of_two_floors_the_higher_number_counts_each() -> None:
    mine, stored = (
        FloorRaised(sequence=5, groups={"p": 9, "q": 1}, sessions=4),
        FloorRaised(sequence=7, groups={"p": 8}, sessions=2),
    )
    assert merge_floors(mine, stored) == FloorRaised(sequence=7, groups={"p": 9, "q": 1}, sessions=4)
    assert merge_floors(mine, None) == mine


def test_the_newest_checkpoints_stay_with_all_that_was_trained_since() -> None:
    log = Log()
    stored = [log.settle(step, first_open=step) for step in range(1, KEPT_CHECKPOINTS + 3)]
    assert log.retention.find_first_needed("train", "p", log.last) == stored[-KEPT_CHECKPOINTS]
    assert log.retention.find_first_needed("train", "p", 3) == 3
    few = Log()
    few.settle(1, first_open=1)
    assert few.retention.find_first_needed("train", "p", few.last) == 0


def test_checkpoints_of_a_lineage_whose_beginning_has_left_the_log_count_on() -> None:
    retention = Retention()
    retention.enter(50, S.task("default", "g000000-0"), make_request("g000000-0"))
    retention.enter(51, S.train("p"), StepTrained(lineage="l3", step=7, version=7, episodes=("g000000-0",)))
    retention.enter(52, S.train("p"), CheckpointStored(lineage="l3", step=7, version=7, file="f", floor=1, first_open_group=1))
    assert len(retention) == 0
    retention.enter(53, S.train("p"), LineageStarted(lineage="l4", worker="w", parent="l3", parent_step=7))
    retention.enter(54, S.train("p"), CheckpointStored(lineage="l4", step=8, version=8, file="f", floor=1, first_open_group=1))
    assert retention.compute_floor(54).sequence == 55
    before, after = (
        LineageStarted(lineage="l3", worker=""),
        LineageStarted(lineage="l4", worker="w", parent="l3", parent_step=7),
    )
    assert complete_lineages([after], "l3") == [before, after]
    assert compute_surviving_steps([before, after]) == {"l4": float("inf"), "l3": 7}


def test_versions_from_before_the_floor_stay_as_far_as_an_open_episode_may_have_them() -> None:
    log = Log()
    published = []
    for number in range(40):
        version = PolicyPublished(policy="p", version=number, lineage="l1", step=number, uri="u", manifest=(), size_bytes=1)
        published.append(log.enter(S.policy("p"), version))
    assert log.retention.find_first_needed("policy", "p", published[20]) == published[4]
    assert log.retention.find_first_needed("policy", "p", published[3]) == 0


def test_journals_leave_together_below_the_first_open_one_and_others_by_name() -> None:
    sessions = SessionRetention()
    for sequence, (name, over) in enumerate(
        [("a", False), ("a", True), ("b", False), ("c", False), ("c", True), ("d", True)], 1
    ):
        sessions.enter(sequence, name, is_over=over)
    assert sessions.compute_prefix(5) == 3
    assert sessions.list_over(5) == {"a": 2, "c": 5}
    for name in ("a", "c"):
        sessions.forget(name)
    assert len(sessions) == 2
