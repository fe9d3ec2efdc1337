"""One episode as text for people, or as facts for programs; token ids stand beside their log-probabilities."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from fleetbus.recording.token_record import NOTABLE_DIFFERENCE, find_differing, split_by_turn
from fleetbus_schemas.tokens import count_tokens, take_tokens, unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from fleetbus.core.episode.turn_contexts import TurnContext
    from fleetbus.recording.episodes import Transcript, TranscriptTurn
    from fleetbus.recording.token_record import TrainedTokens, TrainerColumns
    from fleetbus_schemas import Action, ChatMessage, EpisodeRequested

IDS_PER_LINE = 10


def print_transcript(transcript: Transcript, episode: str, *, tokens: bool, trained: TrainedTokens | None = None) -> None:
    """On standard output: the request, each turn, the result; ``trained``: what the trainer noted of its tokens."""
    request, result = transcript.request, transcript.result
    if request is not None:
        env = f" on {request.task.env}" if request.task.env else ""
        print(f"episode {episode} · task {request.task.key}{env} · group {request.group_id} · {request.split}")
    for claim in transcript.claims:
        resumed = f", resumed at turn {claim.resumed_at_turn}" if claim.resumed_at_turn else ""
        print(f"attempt {claim.attempt} by {claim.worker} ({claim.reason.replace('_', ' ')}{resumed})")
    _print_labels(transcript)
    columns = split_by_turn(trained, [turn.action for turn in transcript.turns])
    for turn, context, trainer in zip_longest(transcript.turns, transcript.contexts, columns):
        _print_turn(turn, _describe_seat(turn.seat, request), context, trainer, tokens=tokens)
    if result is None:
        print("\nno result yet")
        return
    reward = "none" if result.reward is None else f"{result.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward_components.items())
    reward += f" ({parts})" if parts else ""
    reason = result.error or result.note
    error = f" ({result.error_class}{': ' + reason if reason else ''})" if result.error_class else ""
    timings = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in result.timings.items())
    print(f"\nresult: {result.outcome}{error} · reward {reward} · {result.turns} turns, {result.tokens} tokens")
    print(f"times: {timings}" if timings else "")
    for seat in result.seats:
        worth = f"no reward ({seat.reason}), not trained" if seat.reward is None else f"reward {seat.reward:g}"
        policy = request.find_policy(seat.name) if request is not None and request.seats else seat.policy
        by = f" · policy {policy}" if policy else ""
        print(f"seat {seat.name}: {worth} · {len(seat.turns)} turns{by}")
    if result.error_location:
        print(f"failed at {result.error_location}")
    if result.traceback:
        print(result.traceback)


def _print_labels(transcript: Transcript) -> None:
    """Labels and comments, with the numbers that ``fleetbus label --replace`` takes."""
    if transcript.labels:
        names = (label.name if label.turn is None else f"{label.name} (turn {label.turn})" for label in transcript.labels)
        print(f"labels: {', '.join(names)}")
    for comment in transcript.comments:
        at = datetime.fromtimestamp(comment.time_ns / 1e9, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
        about = "" if comment.turn is None else f" on turn {comment.turn}"
        print(f"comment {comment.sequence}{about} by {comment.author or 'somebody'}, {at} UTC: {comment.text}")


def _describe_seat(seat: str, request: EpisodeRequested | None) -> str:
    """The seat with the policy that plays it, where there are several and it is not called like that."""
    policy = request.find_policy(seat) if seat and request is not None and request.seats else ""
    return f"{seat} ({policy})" if policy and policy != seat else seat


def _print_turn(turn: TranscriptTurn, seat: str, context: TurnContext | None, trainer: TrainerColumns, *, tokens: bool) -> None:
    print(f"\n── turn {turn.turn} {f'· {seat} ' if seat else ''}" + "─" * 50)
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
        _print_tokens(action, trainer)


def _print_tokens(action: Action, trainer: TrainerColumns) -> None:
    spans = ", ".join(f"version {span.version} for [{span.start}, {span.stop})" for span in action.versions)
    print(f"  {count_tokens(action.prompt_delta)} prompt tokens: {_list_ids(action.prompt_delta)}")
    print(f"  {count_tokens(action.sampled)} sampled tokens, {spans or 'no version'}, by {action.worker}:")
    logprobs = _list_logprobs(action.logprobs)
    _print_in_lines([f"{token}:{p:.3f}" for token, p in zip(_list_ids(action.sampled), logprobs, strict=False)])
    if any(known := [not math.isnan(p) for p in trainer.logprobs]):
        differing = find_differing(logprobs, trainer.logprobs)
        print(
            f"  {sum(known)} of them trained, by the trainer (log-probability before the update, gradient; * clipped; ! differs"
        )
        print(f"  from the sampler's by more than {NOTABLE_DIFFERENCE}, as {sum(differing)} do):")
        marked = zip_longest(known, *trainer, differing, fillvalue=False)
        _print_in_lines([f"{p:.3f},{g:+.1e}{'*' * c}{'!' * d}" if k else "-" for k, p, g, c, d in marked])


def _print_in_lines(shown: list[str]) -> None:
    for start in range(0, len(shown), IDS_PER_LINE):
        print("    " + "  ".join(shown[start : start + IDS_PER_LINE]))


def _list_ids(packed: bytes) -> list[int]:
    return unpack_ids(take_tokens(packed, len(packed)))


def _list_logprobs(packed: bytes) -> list[float]:
    return unpack_logprobs(take_tokens(packed, len(packed)))


def _format_content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(getattr(part, "text", "") or f"[object {part.object[:12]}]" for part in message.content)


def build_facts(transcript: Transcript, *, tokens: bool, trained: TrainedTokens | None = None) -> dict[str, object]:
    """JSON-like: arrays of numbers instead of bytes, and only if ``tokens``."""
    columns = split_by_turn(trained, [turn.action for turn in transcript.turns])
    facts: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(transcript, enc_hook=repr))
    for shown, turn, trainer in zip(facts["turns"], transcript.turns, columns, strict=True):
        if turn.action is None:
            continue
        action = shown["action"]
        for field in ("prompt_delta", "sampled", "logprobs", "history_hash"):
            action.pop(field, None)
        if tokens:
            action["prompt_delta"] = _list_ids(turn.action.prompt_delta)
            action["sampled"] = _list_ids(turn.action.sampled)
            action["logprobs"] = _list_logprobs(turn.action.logprobs)
            action["trainer"] = dict(zip(trainer._fields, trainer, strict=True))
    if facts["result"]:
        facts["result"].pop("loss_mask", None)
    return facts
