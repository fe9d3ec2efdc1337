"""One episode as the page shows it: its task, claims, time, turns with their tokens. Pure, of the episode's entries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.turn_contexts import TurnContext
from fleetbus.recording.episodes import Transcript, read_transcript
from fleetbus.recording.redaction import is_wiped
from fleetbus.recording.token_record import TrainedTokens, TrainerColumns, find_differing, split_by_turn
from fleetbus_schemas import Action
from fleetbus_schemas.tokens import count_tokens, take_tokens, unpack_ids, unpack_logprobs
from fleetbus_workers.observe.monitor.timeline import timeline
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder

MAX_TOKENS_SHOWN = 20_000
UNTRAINED = TrainerColumns([], [], [])


def describe_episode(
    entries: Sequence[StreamEntry], words: TokenDecoder, trained: TrainedTokens | None = None
) -> dict[str, Any]:
    """The facts of one episode from its entries in log order; ``trained``: what the trainer noted of its tokens."""
    transcript = read_transcript(entries)
    columns = split_by_turn(trained, [turn.action for turn in transcript.turns])
    contexts = transcript.contexts
    return {
        "task": transcript.request and transcript.request.task,
        "sampling": transcript.request and transcript.request.sampling,
        "claims": transcript.claims,
        "labels": transcript.labels,
        "comments": transcript.comments,
        "result": _strip_bytes(transcript.result),
        "spans": timeline(entries),
        "seats": describe_seats(transcript),
        "turns": [
            {
                "turn": turn.turn,
                "attempt": turn.attempt,
                "seat": turn.seat,
                "messages": turn.messages,
                "tools": turn.tools,
                "action": turn.action and describe_action(turn.action, words, columns[number]),
                **_describe_context(contexts, number),
            }
            for number, turn in enumerate(transcript.turns)
        ],
    }


def describe_seats(transcript: Transcript) -> list[dict[str, Any]]:
    """The seats in the order in which they first acted: who plays each, and what it was worth once there is a result."""
    request, result = transcript.request, transcript.result
    worth = {seat.name: seat for seat in result.seats} if result is not None else {}
    turns = Counter(turn.seat for turn in transcript.turns if turn.seat)
    return [
        {
            "seat": seat,
            "policy": request.find_policy(seat) if request is not None else "",
            "turns": count,
            "reward": worth[seat].reward if seat in worth else None,
            "reason": worth[seat].reason if seat in worth else "",
        }
        for seat, count in turns.items()
    ]


def describe_action(action: Action, words: TokenDecoder, trainer: TrainerColumns = UNTRAINED) -> dict[str, Any]:
    """An answer with its tokens, as many as are shown and whole; null where the trainer has trained none. Of tokens that a
    redaction wiped nothing is shown."""
    action, trainer = _leave_out_wiped(action, trainer)
    ids = unpack_ids(take_tokens(action.sampled, MAX_TOKENS_SHOWN))
    logprobs = unpack_logprobs(take_tokens(action.logprobs, MAX_TOKENS_SHOWN))
    is_trained = not all(map(math.isnan, trainer.logprobs))
    prompt = unpack_ids(take_tokens(action.prompt_delta, MAX_TOKENS_SHOWN))
    return {
        "text": action.text,
        "tool_calls": action.tool_calls,
        "finish_reason": action.finish_reason,
        "worker": action.worker,
        "error": action.error,
        "versions": action.versions,
        "ids": ids,
        "logprobs": logprobs,
        "trainer": {name: values[:MAX_TOKENS_SHOWN] for name, values in trainer._asdict().items()} if is_trained else None,
        "differing": [place for place, differs in enumerate(find_differing(logprobs, trainer.logprobs)) if differs],
        "words": words.decode(ids),
        "prompt_ids": prompt,
        "prompt_words": words.decode(prompt),
        "tokens": count_tokens(action.sampled),
        "prompt_tokens": count_tokens(action.prompt_delta),
        "seconds_queued": action.seconds_queued,
        "seconds_generating": action.seconds_generating,
    }


def _leave_out_wiped(action: Action, trainer: TrainerColumns) -> tuple[Action, TrainerColumns]:
    if is_wiped(action.sampled):
        action, trainer = msgspec.structs.replace(action, sampled=b"", logprobs=b""), UNTRAINED
    if is_wiped(action.prompt_delta):
        action = msgspec.structs.replace(action, prompt_delta=b"")
    return action, trainer


def _describe_context(contexts: Sequence[TurnContext], number: int) -> dict[str, Any]:
    """The segment of a turn, and how it begins; nothing for episodes of one segment."""
    if number >= len(contexts) or not any(context.segment for context in contexts):
        return {}
    context = contexts[number]
    return {"segment": context.segment, "held": context.tokens, "begins": context.begins}


def _strip_bytes(result: Any) -> dict[str, Any] | None:
    if result is None:
        return None
    facts = msgspec.structs.asdict(result)
    facts.pop("loss_mask")
    return facts
