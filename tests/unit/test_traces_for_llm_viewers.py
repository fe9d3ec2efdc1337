"""Spans by the conventions for generative AI: names that are in the registry, whole counts, and messages only by choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetbus.interchange.segment_contents import fold_contents
from fleetbus.log.episodes import decode_entries
from fleetbus.recording import load_recording
from fleetbus_schemas import Action, ChatMessage, SegmentOrigin, ToolCall, ToolSpec
from fleetbus_schemas.chat import Image, Text
from fleetbus_schemas.tokens import count_tokens, pack_ids
from fleetbus_workers.observe.tracing import gen_ai
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.gen_ai import PromptLengths, encode_input, encode_output, encode_tools
from fleetbus_workers.observe.tracing.span import Span

RECORDINGS = sorted((Path(__file__).parents[1] / "replay" / "recordings").glob("*.fbrec"))
TEXTS = {gen_ai.INPUT_TEXT, gen_ai.OUTPUT_TEXT, gen_ai.CALL_RESULT, gen_ai.CALL_ID}
CONTENT = TEXTS | {gen_ai.INPUT, gen_ai.OUTPUT, gen_ai.TOOL_DEFINITIONS, gen_ai.CALL_ARGUMENTS}


def trace(recording: Path, *, content: bool = False) -> list[Span]:
    entries = load_recording(recording).entries
    traces = LogTraces(entries[0].subject.split(".")[1], content=content)
    return [span for entry in entries for span in traces.add(entry)]


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_each_name_and_operation_is_in_the_registry(recording: Path) -> None:
    registry: Any = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    names = {value for name, value in vars(registry).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    operations = {each.value for each in registry.GenAiOperationNameValues}
    spans = trace(recording, content=True)
    used = {name for span in spans for name in span.attributes if name.startswith("gen_ai.")}
    assert used <= names and {span.attributes.get(gen_ai.OPERATION, "chat") for span in spans} <= operations
    constants = {value for value in vars(gen_ai).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert constants <= names and len(constants) == 15


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_messages_are_there_by_choice_only_and_change_nothing_else(recording: Path) -> None:
    silent, telling = trace(recording), trace(recording, content=True)
    assert not {name for span in silent for name in span.attributes} & CONTENT
    for one, other in zip(silent, telling, strict=True):
        assert one.attributes == {name: value for name, value in other.attributes.items() if name not in CONTENT}
        for name in CONTENT - TEXTS:
            if name in other.attributes:
                assert isinstance(json.loads(str(other.attributes[name])), (list, dict))
    for span in telling:
        if span.name == "generate":
            assert {gen_ai.INPUT, gen_ai.OUTPUT, *TEXTS - {gen_ai.CALL_RESULT, gen_ai.CALL_ID}} <= set(span.attributes)
            assert {gen_ai.INPUT_TOKENS, gen_ai.MODEL} <= set(span.attributes)
            assert span.attributes[gen_ai.CONVERSATION] == span.attributes["fleetbus.episode"]


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_the_tokens_of_a_prompt_are_those_of_its_whole_segment(recording: Path) -> None:
    actions: dict[tuple[str, int], list[Action]] = {}
    for entry in load_recording(recording).entries:
        if ".act." in entry.subject:
            for _, action in decode_entries(Action, [entry]):
                actions.setdefault((action.episode_id, action.attempt), []).append(action)
    compared = 0
    for played in actions.values():
        if [action.turn for action in played] != list(range(len(played))):
            continue  # played again, or taken over: a tree has each turn once
        lengths = PromptLengths()
        assert [lengths.add(action) for action in played] == [count_tokens(prompt) for prompt in fold_contents(played)[1]]
        compared += 1
    assert compared or not actions


def act(turn: int, prompt: int, sampled: int, segment: int = 0, origin: SegmentOrigin | None = None) -> Action:
    return Action(
        episode_id="e", attempt=1, turn=turn, text="", prompt_delta=pack_ids([1] * prompt), sampled=pack_ids([1] * sampled),
        segment=segment, origin=origin,
    )  # fmt: skip


def test_a_segment_that_leaves_another_and_a_turn_that_is_played_again_are_counted() -> None:
    lengths = PromptLengths()
    assert lengths.add(act(0, 10, 3)) == 10
    assert lengths.add(act(1, 4, 2)) == 17
    assert lengths.add(act(2, 5, 1, 1, SegmentOrigin(parent=0, kept=10, reason="context_dropped", repeated=2))) == 15
    assert lengths.add(act(3, 1, 1, 1)) == 17
    assert lengths.add(act(4, 2, 2, 0)) == 21, "the first segment goes on where it was"
    assert lengths.add(act(5, 7, 1, 2, SegmentOrigin(parent=-1, kept=0, reason="context_dropped"))) == 7
    assert lengths.add(act(2, 6, 1)) == 25, "by another attempt"


def test_messages_are_the_json_of_the_convention() -> None:
    call = ToolCall(name="add", arguments={"a": 1}, id="c1")
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=(Text(text="See"), Image(object="ab"), Text(text="", object="cd"))),
        ChatMessage(role="assistant", reasoning="Hm.", content="I add.", tool_calls=(call,)),
        ChatMessage(role="tool", content="2", tool_call_id="c1", name="add"),
    ]
    asked: dict[str, Any] = {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}
    assert json.loads(encode_input(messages)) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [
            {"type": "text", "content": "See"},
            {"type": "file", "modality": "image", "mime_type": "image/png", "file_id": "ab"},
            {"type": "file", "modality": "text", "mime_type": "text/plain", "file_id": "cd"},
        ]},
        {"role": "assistant", "parts": [
            {"type": "reasoning", "content": "Hm."}, {"type": "text", "content": "I add."}, asked,
        ]},
        {"role": "tool", "name": "add", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
    ]  # fmt: skip
    answer = Action(episode_id="e", attempt=1, turn=0, text="I add.", tool_calls=(call,))
    said: list[Any] = [{"type": "text", "content": "I add."}, asked]
    assert json.loads(encode_output(answer)) == [{"role": "assistant", "parts": said, "finish_reason": "tool_call"}]
    failed = Action(episode_id="e", attempt=1, turn=0, text="", finish_reason="failed")
    assert json.loads(encode_output(failed)) == [{"role": "assistant", "parts": [], "finish_reason": "error"}]
    assert json.loads(encode_tools([ToolSpec("add", "Adds.", {"type": "object"})])) == [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    ]


def test_the_only_call_of_a_turn_has_its_arguments_and_result_on_its_span() -> None:
    call = ToolCall(name="add", arguments={"a": 1}, id="c1")
    result = ChatMessage(role="tool", content="2", tool_call_id="c1")
    assert gen_ai.describe_call_content([call], [result, ChatMessage(role="user", content="go on")]) == {
        gen_ai.CALL_ID: "c1", gen_ai.CALL_ARGUMENTS: '{"a":1}', gen_ai.CALL_RESULT: "2",
        gen_ai.INPUT_TEXT: '{"a":1}', gen_ai.OUTPUT_TEXT: "2",
    }  # fmt: skip
    assert gen_ai.describe_call_content([call, call], [result]) == {}
