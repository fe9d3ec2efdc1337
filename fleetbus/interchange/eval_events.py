"""The events of a sample of an Inspect log, which View shows as its Transcript: the model, tools, scores, an error. Pure.

A call of the model names what it was shown by places in a pool of the sample's messages, so that a log grows with an episode's
length and not with its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fleetbus.core.episode.segments import SegmentError
from fleetbus.interchange.atif_export import build_calls
from fleetbus.interchange.episode_facts import find_episode_id
from fleetbus.interchange.segment_contents import iterate_prompts
from fleetbus.interchange.times import format_time
from fleetbus.recording.episodes import MAX_SECONDS, Transcript, TranscriptTurn
from fleetbus_schemas import Action, ToolSpec
from fleetbus_schemas.tokens import count_tokens

EPOCH = "1970-01-01T00:00:00+00:00"
"""The time of what has none: an event without one is refused."""

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})

Event = dict[str, Any]
Span = tuple[int, int]


def build_pool(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The pool of messages that events point into; the tokens of answers stand in the sample's own messages alone."""
    return {"messages": [_without_facts(each) for each in messages], "calls": []}


def build_events(
    transcript: Transcript, messages: list[dict[str, Any]], scores: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> list[Event]:
    """In the order in which they happened; ``messages`` are all of the sample's, as `build_pool` takes them."""
    name, began, events = find_episode_id(transcript), transcript.requested_ns, list[Event]()
    places = _find_places(transcript)
    shown = _find_shown(transcript, places)
    tools: tuple[ToolSpec, ...] = ()
    answered = [number for number, turn in enumerate(transcript.turns) if turn.action is not None]
    for number, refs in zip(answered, shown, strict=True):
        turn = transcript.turns[number]
        tools = turn.tools or tools
        events.append(_build_model(turn, refs, tools, messages[places[number][1]], began))
        events += _build_tools(turn, transcript.turns[number + 1 :][:1], messages, places[number][1] + 1, began)
    for scorer, score in (scores or {}).items():
        events.append({"event": "score", "score": score, "scorer": scorer, **_build_times(transcript.finished_ns, began)})
    if error is not None:
        events.append({"event": "error", "error": error, **_build_times(transcript.finished_ns, began)})
    return [{**event, "uuid": f"{name}-{number}"} for number, event in enumerate(events)]


def _find_places(transcript: Transcript) -> list[Span]:
    """Of each turn the places of its messages in those of the sample; its answer stands behind them."""
    places, at = [], 0
    for turn in transcript.turns:
        places.append((at, at + len(turn.messages)))
        at += len(turn.messages) + (turn.action is not None)
    return places


def _find_shown(transcript: Transcript, places: list[Span]) -> list[list[Span]]:
    """Of each answer the places of all that the policy was shown; of turns that are no tree, all before it."""
    own = [place for place, turn in zip(places, transcript.turns, strict=True) if turn.action is not None]
    found = []
    try:
        for content in iterate_prompts([turn.action for turn in transcript.turns if turn.action is not None]):
            spans = ((own[held.turn][1], own[held.turn][1] + 1) if held.is_answer else own[held.turn] for held in content.held)
            found.append(list(_join(spans)))
    except (SegmentError, ValueError):
        return [[(0, end)] for _, end in own]
    return found


def _join(spans: Iterator[Span]) -> Iterator[Span]:
    """Neighbours as one; empty ones are left out."""
    start = end = -1
    for first, last in spans:
        if first == last:
            continue
        if first != end:
            if start < end:
                yield start, end
            start = first
        end = last
    if start < end:
        yield start, end


def _build_model(turn: TranscriptTurn, refs: list[Span], tools: tuple[ToolSpec, ...], answer: Any, began: int) -> Event:
    action = turn.action
    assert action is not None
    model = answer["model"]
    took = action.seconds_generating if 0.0 <= action.seconds_generating < MAX_SECONDS else 0.0  # or any number
    shown, sampled = count_tokens(action.prompt_delta), count_tokens(action.sampled)
    output = {
        "model": model,
        "choices": [{"message": _without_facts(answer), "stop_reason": find_stop_reason(action)}],
        "completion": action.text,
        "usage": {"input_tokens": shown, "output_tokens": sampled, "total_tokens": shown + sampled},
        "time": took,
    }  # fmt: skip
    event = {
        "event": "model", "model": model, "input": [], "input_refs": refs, "tools": [_build_tool(tool) for tool in tools],
        "tool_choice": "auto", "config": {}, "output": output, "working_time": took,
        **_build_times(turn.time_ns - round(took * 1e9), began),
    }  # fmt: skip
    if completed := format_time(turn.time_ns):
        event["completed"] = completed
    return {**event, "error": action.error} if action.error else event


def _build_tools(
    turn: TranscriptTurn, following: tuple[TranscriptTurn, ...], messages: list[dict[str, Any]], at: int, began: int
) -> Iterator[Event]:
    """The calls of an answer with what came back: the tools' messages of the turn that follows, which begin at ``at``, by the
    id of the call, else in order."""
    assert turn.action is not None
    count = len(following[0].messages) if following else 0
    results = [each for each in messages[at : at + count] if each["role"] == "tool"]
    for call in build_calls(turn.action):
        named = [each for each in results if each.get("tool_call_id") == call.tool_call_id]
        unnamed = [each for each in results if not each.get("tool_call_id")]
        result = next(iter(named or unnamed), None)
        event = {
            "event": "tool", "type": "function", "id": call.tool_call_id, "function": call.function_name,
            "arguments": call.arguments, "result": "", "events": [], **_build_times(turn.time_ns, began),
        }  # fmt: skip
        if result is not None:
            results.remove(result)
            event |= {"result": result["content"], "message_id": result["id"]}
            event |= _find_end(turn, following[0].action, following[0].time_ns)
        yield event


def _find_end(turn: TranscriptTurn, next_action: Action | None, next_ns: int) -> Event:
    """The end of the environment's step, as far as it is known: the next answer was asked for then."""
    seconds = next_action.seconds_generating + next_action.seconds_queued if next_action is not None else math.inf
    if not (turn.time_ns and 0.0 <= seconds < MAX_SECONDS):  # of any message
        return {}
    asked_ns = next_ns - round(seconds * 1e9)
    completed = format_time(asked_ns)
    if completed is None or asked_ns < turn.time_ns:
        return {}
    return {"completed": completed, "working_time": (asked_ns - turn.time_ns) / 1e9}


def _build_tool(tool: ToolSpec) -> dict[str, Any]:
    """A tool as Inspect describes one; of schemas that it may refuse the types and descriptions are left."""
    given = tool.parameters.get("properties")
    properties = given if isinstance(given, dict) else {}
    required = tool.parameters.get("required")
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": {
            "type": "object",
            "properties": {str(name): _build_parameter(schema) for name, schema in properties.items()},
            "required": [str(name) for name in required] if isinstance(required, list) else [],
            "additionalProperties": False,
        },
    }


def _build_parameter(schema: Any) -> dict[str, Any]:
    known = schema if isinstance(schema, dict) else {}
    kind, about = known.get("type"), known.get("description")
    found: dict[str, Any] = {"type": kind} if isinstance(kind, str) and kind in JSON_TYPES else {}
    return found | ({"description": about} if isinstance(about, str) else {})


def find_stop_reason(action: Action) -> str:
    """The reason in Inspect's words."""
    return "stop" if action.finish_reason == "stop" else "max_tokens"


def _build_times(time_ns: int, began: int) -> Event:
    return {"timestamp": format_time(time_ns) or EPOCH, "working_start": max(time_ns - began, 0) / 1e9 if began else 0.0}


def _without_facts(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "metadata"}
