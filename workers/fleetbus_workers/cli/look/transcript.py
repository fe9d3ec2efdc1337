"""One episode as text for people, or as facts for programs; token ids stand beside their log-probabilities."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from fleetbus_schemas.tokens import count_tokens, take_tokens, unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from fleetbus.core.episode.turn_contexts import TurnContext
    from fleetbus.recording.episodes import Transcript, TranscriptTurn
    from fleetbus_schemas import Action, ChatMessage

IDS_PER_LINE = 10


def print_transcript(transcript: Transcript, episode: str, *, tokens: bool) -> None:
    """On standard output: the request, each turn, the result."""
    request, result = transcript.request, transcript.result
    if request is not None:
        env = f" on {request.task.env}" if request.task.env else ""
        print(f"episode {episode} · task {request.task.key}{env} · group {request.group_id} · {request.split}")
    for claim in transcript.claims:
        resumed = f", resumed at turn {claim.resumed_at_turn}" if claim.resumed_at_turn else ""
        print(f"attempt {claim.attempt} by {claim.worker} ({claim.reason.replace('_', ' ')}{resumed})")
    for turn, context in zip_longest(transcript.turns, transcript.contexts):
        _print_turn(turn, context, tokens=tokens)
    if result is None:
        print("\nno result yet")
        return
    reward = "none" if result.reward is None else f"{result.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward_components.items())
    reward += f" ({parts})" if parts else ""
    error = f" ({result.error_class}{': ' + result.error if result.error else ''})" if result.error_class else ""
    timings = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in result.timings.items())
    print(f"\nresult: {result.outcome}{error} · reward {reward} · {result.turns} turns, {result.tokens} tokens")
    print(f"times: {timings}" if timings else "")
    if result.error_location:
        print(f"failed at {result.error_location}")
    if result.traceback:
        print(result.traceback)


def _print_turn(turn: TranscriptTurn, context: TurnContext | None, *, tokens: bool) -> None:
    print(f"\n── turn {turn.turn} " + "─" * 50)
    if turn.tools:
        print(f"tools: {', '.join(tool.name for tool in turn.tools)}")
    for message in turn.messages:
        print(f"[{message.role}] {_format_content(message)}")
    action = turn.action
    if context is not None and context.begins:
        print(f"  {context.begins}")
    elif context is not None and context.segment:
        print(f"  in segment {context.segment}, {context.tokens} tokens")
    if action is None:
        print("(no action yet)")
        return
    print(f"[assistant] {action.text}")
    for call in action.tool_calls:
        print(f"  calls {call.name}({call.arguments})")
    if action.finish_reason != "stop":
        print(f"  finish reason {action.finish_reason} {action.error_class} {action.error}".rstrip())
    if tokens:
        _print_tokens(action)


def _print_tokens(action: Action) -> None:
    spans = ", ".join(f"version {span.version} for [{span.start}, {span.stop})" for span in action.versions)
    print(f"  {count_tokens(action.prompt_delta)} prompt tokens: {_list_ids(action.prompt_delta)}")
    print(f"  {count_tokens(action.sampled)} sampled tokens, {spans or 'no version'}, by {action.worker}:")
    pairs = list(zip(_list_ids(action.sampled), _list_logprobs(action.logprobs), strict=False))
    for start in range(0, len(pairs), IDS_PER_LINE):
        print("    " + "  ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs[start : start + IDS_PER_LINE]))


def _list_ids(packed: bytes) -> list[int]:
    return unpack_ids(take_tokens(packed, len(packed)))


def _list_logprobs(packed: bytes) -> list[float]:
    return unpack_logprobs(take_tokens(packed, len(packed)))


def _format_content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(getattr(part, "text", "") or f"[object {part.object[:12]}]" for part in message.content)


def build_facts(transcript: Transcript, *, tokens: bool) -> dict[str, object]:
    """JSON-like: arrays of numbers instead of bytes, and only if ``tokens``."""
    facts: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(transcript, enc_hook=repr))
    for shown, turn in zip(facts["turns"], transcript.turns, strict=True):
        if turn.action is None:
            continue
        action = shown["action"]
        for field in ("prompt_delta", "sampled", "logprobs", "history_hash"):
            action.pop(field, None)
        if tokens:
            action["prompt_delta"] = _list_ids(turn.action.prompt_delta)
            action["sampled"] = _list_ids(turn.action.sampled)
            action["logprobs"] = _list_logprobs(turn.action.logprobs)
    if facts["result"]:
        facts["result"].pop("loss_mask", None)
    return facts
