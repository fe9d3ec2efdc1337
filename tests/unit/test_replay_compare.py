"""Messages are compared by value, field by field; only declared fields may differ, and a difference names the place."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import (
    Action,
    ActionReference,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    StepTrained,
    Task,
    ToolSpec,
    VersionSpan,
)
from fleetbus_schemas.tokens import pack_ids, pack_logprobs
from fleetbus_workers.replay.compare import VOLATILE, first_difference
from fleetbus_workers.replay.report import Difference, Report

ACTION = Action(
    episode_id="e",
    attempt=1,
    turn=0,
    text="t",
    prompt_delta=pack_ids([1, 2]),
    sampled=pack_ids([3, 4, 5]),
    logprobs=pack_logprobs([-0.5, -1.0, -1.5]),
    versions=(VersionSpan(version=1, start=0, stop=3),),
)
FINISHED = EpisodeFinished(
    episode_id="e",
    group_id="g",
    attempt=1,
    outcome="completed",
    worker="w",
    reward=1.0,
    actions=(ActionReference(sequence=5, lane="e0", turn=0),),
    timings={"open": 0.1},
)
OBSERVATION = Observation(
    episode_id="e",
    attempt=1,
    turn=0,
    policy="p",
    messages=(ChatMessage(role="user", content="hi"),),
    tools=(ToolSpec(name="look", parameters={"type": "object"}),),
    tokens_left=9,
    environment_lane="e0",
    deadline_ns=1,
)
STEP = StepTrained(lineage="l1", step=1, version=1, episodes=("a",), metrics={"loss": 0.5, "seconds_train": 1.0})


def changed(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **fields)


@pytest.mark.parametrize(
    ("recorded", "fields", "place"),
    [
        (ACTION, {"sampled": pack_ids([3, 9, 5])}, "sampled[1]"),
        (ACTION, {"sampled": pack_ids([3, 4])}, "sampled (length)"),
        (ACTION, {"logprobs": pack_logprobs([-0.5, -1.1, -1.5])}, "logprobs[1]"),
        (ACTION, {"versions": (VersionSpan(version=2, start=0, stop=3),)}, "versions[0].version"),
        (OBSERVATION, {"messages": (ChatMessage(role="user", content="ho"),)}, "messages[0].content"),
        (OBSERVATION, {"tools": (ToolSpec(name="look", parameters={}),)}, "tools[0].parameters.type"),
        (OBSERVATION, {"tools": (ToolSpec(name="look", parameters={"type": "object", "x": 1}),)}, "tools[0].parameters.x"),
        (FINISHED, {"reward": None}, "reward"),
        (FINISHED, {"reward": 0.999}, "reward"),
        (FINISHED, {"actions": (ActionReference(sequence=6, lane="e0", turn=0),)}, "actions[0].sequence"),
        (STEP, {"metrics": {"loss": 0.6, "seconds_train": 1.0}}, "metrics.loss"),
        (STEP, {"metrics": {"seconds_train": 1.0}}, "metrics.loss"),
        (STEP, {"metrics": {"loss": math.nan, "seconds_train": 1.0}}, "metrics.loss"),
        (STEP, {"episodes": ("b",)}, "episodes[0]"),
    ],
)
def test_a_difference_names_its_place(recorded: Any, fields: dict[str, Any], place: str) -> None:
    found = first_difference(recorded, changed(recorded, **fields))
    assert found is not None and found.field == place


@pytest.mark.parametrize(
    ("recorded", "fields"),
    [
        (ACTION, {"worker": "other", "lane": "i7", "seconds_generating": 9.0, "observation_sequence": 7}),
        (ACTION, {"logprobs": pack_logprobs([-0.5, -1.0005, -1.5])}),
        (OBSERVATION, {"environment_lane": "e9", "hop": 2, "attempt": 2}),
        (FINISHED, {"worker": "x", "timings": {"open": 9.0, "close": 1.0}, "attempt": 3, "attempts": 3}),
        (FINISHED, {"actions": (ActionReference(sequence=5, lane="e7", turn=0),)}),
        (STEP, {"metrics": {"loss": 0.50001, "seconds_train": 7.0, "seconds_wait": 1.0, "added_later": 1.0}}),
        (STEP, {}),
    ],
)
def test_what_is_volatile_or_within_tolerance_does_not_differ(recorded: Any, fields: dict[str, Any]) -> None:
    assert first_difference(recorded, changed(recorded, **fields)) is None


def test_numbers_that_are_none_on_both_sides_are_the_same() -> None:
    step = changed(STEP, metrics={"loss": math.nan})
    assert first_difference(step, changed(STEP, metrics={"loss": math.nan})) is None


def test_further_fields_can_be_ignored() -> None:
    other = changed(FINISHED, reward=0.0)
    assert first_difference(FINISHED, other, ignored=frozenset({"EpisodeFinished.reward"})) is None
    assert first_difference(FINISHED, other, ignored=frozenset({"Observation.reward"})) is not None


def test_another_type_of_message_is_a_difference() -> None:
    request = EpisodeRequested(
        episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="p", deadline_ns=1
    )
    found = first_difference(FINISHED, request)
    assert found is not None and found == ("type", "EpisodeFinished", "EpisodeRequested")


def test_every_volatile_field_exists() -> None:
    import fleetbus_schemas

    for kind, fields in VOLATILE.items():
        known = getattr(fleetbus_schemas, kind).__struct_fields__
        assert {field.partition(".")[0] for field in fields} <= set(known)


def test_a_report_shows_the_difference_that_was_recorded_first() -> None:
    def difference(sequence: int) -> Difference:
        return Difference(message=f"m{sequence}", field="f", recorded="1", replayed="2", sequence=sequence)

    report = Report(role="learner", differences=[difference(9), difference(4)])
    report.compared["Action"] += 1
    assert report.first == difference(4) and not report.same
    assert any("and 1 more" in line for line in report.lines())
    assert not Report(role="learner").same, "nothing compared is not the same"
