"""Every subject is caught by the wildcard that is meant to catch it and by no other, and no name can break out of its token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus_schemas import ANY_LANE, InvalidName, Subjects
from fleetbus_schemas.subjects import check_name

S = Subjects("r1")
OTHER_RUNS = (Subjects("r"), Subjects("r2"), Subjects("r1-x"))

LOGGED: dict[str, Callable[[Subjects], str]] = {
    "task": lambda subjects: subjects.task("pool", "e1"),
    "observation on any lane": lambda subjects: subjects.observation("policy", ANY_LANE, "e1"),
    "observation on a lane": lambda subjects: subjects.observation("policy", "i3", "e1"),
    "action": lambda subjects: subjects.action("e3", "e1"),
    "episode": lambda subjects: subjects.episode("e1"),
    "session": lambda subjects: subjects.session("s1"),
    "policy": lambda subjects: subjects.policy("main"),
    "train": lambda subjects: subjects.train("main"),
    "life": lambda subjects: subjects.life("environment", "w1"),
}
UNLOGGED: dict[str, Callable[[Subjects], str]] = {
    "rpc": lambda subjects: subjects.rpc("w1", "s1"),
    "control of one": lambda subjects: subjects.control("inference", "w1", "drain"),
    "control of all": lambda subjects: subjects.control("inference", "all", "drain"),
    "heartbeat": lambda subjects: subjects.heartbeat("learner", "w1"),
    "lane lease": lambda subjects: subjects.lane("environment", "e3"),
}
WILDCARDS: dict[str, tuple[str, set[str]]] = {
    "log": (S.log, set(LOGGED)),
    "lanes": (S.lanes, {"lane lease"}),
    "heartbeats": (S.heartbeats, {"heartbeat"}),
    "heartbeats of a role": (S.heartbeat("learner", "*"), {"heartbeat"}),
    "tasks": (S.tasks(), {"task"}),
    "tasks of the pool": (S.tasks("pool"), {"task"}),
    "tasks of another pool": (S.tasks("pool2"), set()),
    "observations": (S.observations(), {"observation on any lane", "observation on a lane"}),
    "observations of the policy": (S.observations("policy"), {"observation on any lane", "observation on a lane"}),
    "observations of another policy": (S.observations("pol"), set()),
    "observations on any lane": (S.observations("policy", ANY_LANE), {"observation on any lane"}),
    "observations on the lane": (S.observations("policy", "i3"), {"observation on a lane"}),
    "observations on another lane": (S.observations("policy", "i30"), set()),
    "actions": (S.actions(), {"action"}),
    "actions on the lane": (S.actions("e3"), {"action"}),
    "actions on another lane": (S.actions("e30"), set()),
    "episodes": (S.episodes, {"episode"}),
    "lives": (S.life("*", "*"), {"life"}),
}


def matches(pattern: str, subject: str) -> bool:
    """The server's rule: ``*`` is one token, ``>`` at the end is one token or more."""
    wanted, given_tokens = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given_tokens) > index
        if index >= len(given_tokens) or token not in ("*", given_tokens[index]):
            return False
    return len(wanted) == len(given_tokens)


@pytest.mark.parametrize("name", WILDCARDS)
def test_a_wildcard_catches_exactly_what_it_is_meant_to_catch(name: str) -> None:
    wildcard, meant = WILDCARDS[name]
    assert {kind for kind, build in (LOGGED | UNLOGGED).items() if matches(wildcard, build(S))} == meant


@pytest.mark.parametrize("kind", LOGGED | UNLOGGED)
def test_no_wildcard_of_one_run_catches_a_subject_of_another(kind: str) -> None:
    for other in OTHER_RUNS:
        subject = (LOGGED | UNLOGGED)[kind](other)
        assert [name for name, (wildcard, _) in WILDCARDS.items() if matches(wildcard, subject)] == []


def test_every_kind_of_subject_is_its_own() -> None:
    subjects = [build(S) for build in (LOGGED | UNLOGGED).values()]
    assert len(set(subjects)) == len(subjects)


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True)


@settings(deadline=None)
@given(st.tuples(NAMES, NAMES, NAMES), st.tuples(NAMES, NAMES, NAMES))
def test_different_names_never_lead_to_the_same_observation_subject(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (S.observation(*one) == S.observation(*other)) == (one == other)


def plan() -> RunPlan:
    return plan_run("r1", pools=("p", "p2"), policies=("a", "b"), lanes=3)


@pytest.mark.parametrize(
    "subject",
    [
        *(S.task(pool, "e1") for pool in ("p", "p2")),
        *(S.observation(policy, lane, "e1") for policy in ("a", "b") for lane in (ANY_LANE, "i0", "i2")),
        *(S.action(lane, "e1") for lane in ("e0", "e2")),
    ],
)
def test_every_message_that_is_work_goes_to_exactly_one_consumer_of_the_plan(subject: str) -> None:
    assert len([consumer for consumer in plan().consumers if matches(consumer.filter, subject)]) == 1


def test_every_consumer_of_the_plan_reads_from_the_log_alone_and_has_a_name_of_its_own() -> None:
    sample = {consumer.name: consumer.filter.replace(">", "e1") for consumer in plan().consumers}
    assert len(sample) == len(plan().consumers)
    assert all(matches(S.log, subject) for subject in sample.values())


def test_the_two_streams_of_a_run_overlap_neither_each_other_nor_those_of_another_run() -> None:
    log, lanes = plan().log.subjects, plan().lanes.subjects
    other = plan_run("r1x")
    for subject in (*log, *other.log.subjects, *other.lanes.subjects):
        assert not any(matches(pattern, subject.replace(">", "x.y")) for pattern in lanes)
    for subject in (*lanes, *other.log.subjects, *other.lanes.subjects):
        assert not any(matches(pattern, subject.replace(">", "x.y")) for pattern in log)


BAD_NAMES = ["", "a.b", "*", ">", "a b", "a\tb", "a\n", "ä", "a/b", "$JS", "x" * 129, "\u202e", "a\x00"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_token_is_refused_and_the_error_says_which(name: str) -> None:
    with pytest.raises(InvalidName, match=r"pool .* must be 1 to 128"):
        check_name("pool", name)
    with pytest.raises(InvalidName, match="run "):
        Subjects(name)


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 128, "-", "0"])
def test_a_name_that_is_a_token_passes_unchanged(name: str) -> None:
    assert check_name("pool", name) == name
    assert Subjects(name).run == name
