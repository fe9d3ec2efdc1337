"""An episode as a sample of an Inspect log: its conversation, with the tokens of each answer in that message's metadata."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.core.text.tool_calls import final_answer, is_done
from fleetbus.interchange.atif_export import build_calls
from fleetbus.interchange.episode_facts import KEY, build_episode_facts, find_episode_id, find_logprobs, find_versions, has_ids
from fleetbus.interchange.eval_events import build_events, build_pool, find_stop_reason
from fleetbus.interchange.times import format_time
from fleetbus.recording.episodes import Transcript, TranscriptTurn
from fleetbus_schemas import GRADED, Action, ChatMessage, EpisodeFinished, Image, Text
from fleetbus_schemas.tokens import count_tokens, unpack_ids

THIN_CHARACTERS = 1000
"""Most characters of a text in a summary."""

Sample = dict[str, Any]


def build_sample(transcript: Transcript, run: str, *, name: str, epoch: int, model: str) -> Sample:
    """The sample; ``name`` and ``epoch`` are what the log knows it by."""
    request, result = transcript.request, transcript.result
    answered = [turn.action for turn in transcript.turns if turn.action is not None]
    usage = count_usage(answered)
    messages = build_messages(transcript, model)
    sample: Sample = {
        "id": name,
        "epoch": epoch,
        "input": request.task.prompt if request is not None else "",
        "target": "",
        "messages": messages,
        "output": _build_output(answered, model, usage),
        "scores": build_scores(result, answered),
        "metadata": build_episode_facts(transcript, run),
        "store": {},
        "events": [],
        "events_data": build_pool(messages),
        "model_usage": {model: usage} if answered else {},
        "attachments": {},
        "uuid": find_episode_id(transcript),
        "turn_count": len(answered),
    }
    if transcript.requested_ns and transcript.finished_ns:
        seconds = (transcript.finished_ns - transcript.requested_ns) / 1e9
        sample |= {"started_at": format_time(transcript.requested_ns), "completed_at": format_time(transcript.finished_ns)}
        sample |= {"total_time": max(seconds, 0.0), "working_time": max(seconds, 0.0)}
    if result is not None and result.outcome not in GRADED:
        text = ": ".join(part for part in (result.outcome, result.error_class, result.error) if part)
        sample["error"] = {"message": text, "traceback": result.traceback, "traceback_ansi": result.traceback}
    elif result is not None and result.outcome == "truncated" and request is not None:
        by_turns = result.turns >= request.max_turns or result.error_class == "seat_turns"
        named = [each for each in request.seat_limits if f"the seat {each.seat} has" in result.note]
        limit = named[0] if named and result.error_class in ("seat_turns", "seat_tokens") else request
        kind = "turn" if by_turns else "token"
        reached = getattr(limit, f"max_{kind}s") or getattr(request, f"max_{kind}s")
        sample["limit"] = {"type": kind, "limit": reached}
    sample["events"] = build_events(transcript, messages, sample["scores"], sample.get("error"))
    return {key: value for key, value in sample.items() if value is not None}


def build_summary(sample: Sample) -> Sample:
    """The sample as the list of a log shows it, without what is long."""
    fields = (
        "id",
        "epoch",
        "target",
        "scores",
        "model_usage",
        "started_at",
        "completed_at",
        "total_time",
        "working_time",
        "uuid",
    )
    summary = {field: sample[field] for field in fields if field in sample}
    facts = {key: value for key, value in sample["metadata"].items() if isinstance(value, str | int | float | bool)}
    summary |= {"input": sample["input"][:THIN_CHARACTERS], "metadata": facts, "completed": True}
    summary |= {"message_count": len(sample["messages"]), "turn_count": sample["turn_count"]}
    summary |= {"error": sample["error"]["message"]} if "error" in sample else {}
    summary |= {"limit": sample["limit"]["type"]} if "limit" in sample else {}
    return summary


def count_usage(actions: list[Action]) -> dict[str, int]:
    """Tokens shown and sampled; those of a turn's prompt that stood there before are not counted again."""
    shown = sum(count_tokens(action.prompt_delta) for action in actions)
    sampled = sum(count_tokens(action.sampled) for action in actions)
    return {"input_tokens": shown, "output_tokens": sampled, "total_tokens": shown + sampled}


def build_scores(result: EpisodeFinished | None, answered: list[Action]) -> dict[str, Any] | None:
    """The reward and what it was made of, as scores; None for an episode without a grade."""
    if result is None or result.reward is None:
        return None
    text = answered[-1].text if answered else ""
    answer = final_answer(text) if is_done(text) else text
    scores = {"reward": {"value": result.reward, "answer": answer, "explanation": result.note or result.outcome}}
    parts = result.reward_components if len(result.reward_components) > 1 else {}
    return scores | {name: {"value": value} for name, value in parts.items() if name != "reward"}


def build_messages(transcript: Transcript, model: str) -> list[dict[str, Any]]:
    """The conversation in the order in which it happened, over all segments."""
    found: list[dict[str, Any]] = []
    for turn in transcript.turns:
        segment = turn.action.segment if turn.action is not None else 0
        for message in turn.messages:
            found.append(_build_message(message, len(found), segment))
        if turn.action is not None:
            found.append(_build_answer(turn, turn.action, len(found), model))
    result = transcript.result
    if result is not None and result.last_observation:
        metadata = {KEY: {"seen": False}}
        found.append({"id": str(len(found)), "role": "user", "content": result.last_observation, "metadata": metadata})
    return found


def _build_message(message: ChatMessage, place: int, segment: int) -> dict[str, Any]:
    own: dict[str, Any] = {"segment": segment} if segment else {}
    own |= {"name": message.name} if message.name and message.role != "tool" else {}
    built: dict[str, Any] = {"id": str(place), "role": message.role, "content": _build_content(message.content)}
    if message.role == "tool":
        built |= {"tool_call_id": message.tool_call_id or None, "function": message.name or None}
    if message.role == "assistant":  # shown to the policy, not sampled by it
        own |= {"shown": True}
    return {**built, "metadata": {KEY: own}} if own else built


def _build_answer(turn: TranscriptTurn, action: Action, place: int, model: str) -> dict[str, Any]:
    own: dict[str, Any] = {"turn": turn.turn, "attempt": turn.attempt, "policy_versions": find_versions(action)}
    own |= {"finish_reason": action.finish_reason, "worker": action.worker}
    own |= {"seat": turn.seat} if turn.seat else {}
    if has_ids(action):
        own["prompt_delta_token_ids"] = unpack_ids(action.prompt_delta)
        own["completion_token_ids"] = unpack_ids(action.sampled)
        own["logprobs"] = find_logprobs(action)
    if turn.tools:
        own["tools"] = [msgspec.to_builtins(tool) for tool in turn.tools]
    if action.segment:
        own["segment"] = action.segment
    if action.origin is not None:
        origin = action.origin
        own["origin"] = [origin.parent, origin.kept, origin.reason, origin.repeated]
    if action.images:
        own["images"] = [[image.object, image.start, image.stop] for image in action.images]
    built: dict[str, Any] = {
        "id": str(place),
        "role": "assistant",
        "content": action.text,
        "source": "generate",
        "model": model,
    }
    calls = build_calls(action)
    if calls:
        built["tool_calls"] = [
            {"id": call.tool_call_id, "function": call.function_name, "arguments": call.arguments, "type": "function"}
            for call in calls
        ]
        facts = [call.extra or {} for call in calls]
        own |= {"calls": facts} if any(facts) else {}
    return {**built, "metadata": {KEY: own}}


def _build_output(answered: list[Action], model: str, usage: dict[str, int]) -> dict[str, Any]:
    if not answered:
        return {"model": model, "choices": []}
    last = answered[-1]
    message = {"role": "assistant", "content": last.text, "source": "generate", "model": model}
    choices = [{"message": message, "stop_reason": find_stop_reason(last)}]
    return {"model": model, "choices": choices, "completion": last.text, "usage": usage}


def _build_content(content: str | tuple[Text | Image, ...]) -> str | list[dict[str, str]]:
    """Text; an object of the run's bucket is named by its hash, for the log has no place for it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": getattr(part, "text", "") or f"[object {part.object}]"} for part in content]
