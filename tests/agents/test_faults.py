"""Answers that an agent cannot use, as a table."""

from __future__ import annotations

import json

import pytest

from fleetbus_schemas import Action, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.base import CHANGES_SAMPLING, Answer
from fleetbus_workers.environment.adapters.agent.faults import Refused, find_problems, find_repair, is_programs_error

TOOLS = (ToolSpec(name="look", parameters={"type": "object", "required": ["at"]}),)
TABLE: dict[str, tuple[dict[str, object], dict[str, object], list[str]]] = {
    "words": ({}, {"text": "Done."}, []),
    "a good call": ({}, {"tool_calls": (ToolCall(name="look", arguments={"at": 1}),)}, []),
    "a broken call": ({"tool_call_errors": ("no JSON",)}, {"text": "x"}, ["a call that cannot be read: no JSON"]),
    "nothing": ({}, {}, ["no text and no call"]),
    "half of it": ({"finish_reason": "length"}, {"text": "x", "sampled_tokens": 9}, ["cut after 9 tokens"]),
    "another tool": ({}, {"tool_calls": (ToolCall(name="fly"),)}, ["a call of 'fly', which is no tool of the agent"]),
    "too little": ({}, {"tool_calls": (ToolCall(name="look"),)}, ["a call of 'look' without at"]),
}


@pytest.mark.parametrize(("action", "answer", "problems"), TABLE.values(), ids=TABLE)
def test_what_cannot_be_used_of_an_answer_is_named(
    action: dict[str, object], answer: dict[str, object], problems: list[str]
) -> None:
    given = Action(episode_id="e", attempt=1, turn=0, text="", **action)  # type: ignore[arg-type]
    assert list(find_problems(given, Answer(number=1, **({"text": ""} | answer)), TOOLS)) == problems  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "reason", "is_repair"),
    [
        (["Play."], f"response_format is not supported here: {CHANGES_SAMPLING}", True),
        (["Play.", "so: the answer\n"], f"response_format is not supported here: {CHANGES_SAMPLING}", False),
        (["Play."], "messages is empty", False),
    ],
)
def test_a_forced_format_without_the_answer_is_a_repair(said: list[str], reason: str, is_repair: bool) -> None:
    body = json.dumps({"messages": [{"content": text} for text in said]}).encode()
    assert bool(list(find_repair(Refused(body=body, reason=reason), Answer(number=1, text="the answer")))) is is_repair
    assert not list(find_repair(None, Answer(number=1, text="the answer")))


def test_a_signal_is_no_error_of_the_program() -> None:
    assert [is_programs_error(status) for status in (None, 0, 1, 127, 137, -9)] == [False, False, True, True, False, False]
