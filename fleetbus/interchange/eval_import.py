"""Samples of a log of Inspect as episodes: each assistant's message is a turn. Token ids are there if fleetbus wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.interchange.episode_facts import KEY, read_messages, read_number, read_text
from fleetbus.interchange.eval_content import Message, read_calls, read_message, read_text_content
from fleetbus.interchange.imported import ImportedEpisode, ImportedTokens, ImportedTurn
from fleetbus.interchange.times import parse_time
from fleetbus.interchange.turn_facts import read_turn_facts
from fleetbus_schemas import ChatMessage, SegmentOrigin, ToolSpec
from fleetbus_schemas.message import UNREADABLE

GRADES: Mapping[object, float] = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
"""Values of scores that are no numbers, as Inspect counts them."""

MAX_MESSAGES = 20_000


class Score(msgspec.Struct):
    """The value that a scorer gave."""

    value: Any = None


class Sample(msgspec.Struct, kw_only=True):
    """The fields of a sample that an episode has."""

    id: int | str
    epoch: int = 1
    input: str | list[Message] = ""
    messages: list[Message] = msgspec.field(default_factory=list)
    scores: dict[str, Score] | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    attachments: dict[str, str] = msgspec.field(default_factory=dict)
    error: dict[str, Any] | None = None
    limit: dict[str, Any] | None = None
    uuid: str | None = None
    started_at: str | None = None


class WrittenTokens(msgspec.Struct, kw_only=True):
    """The tokens of an answer as fleetbus writes them, and where its segment leaves another one."""

    prompt_delta_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    segment: int = 0
    origin: SegmentOrigin | None = None
    tools: tuple[ToolSpec, ...] = ()


_decode = msgspec.json.Decoder(Sample).decode


def read_sample(data: bytes, place: str, *, score: str = "") -> ImportedEpisode:
    """The episode of a sample, graded by the scorer ``score``, or by its first. Raises `UserError` for what is none."""
    try:
        sample = _decode(data)
    except msgspec.ValidationError as error:
        raise UserError(f"{place} is no sample of Inspect: {error}") from error
    except UNREADABLE as error:
        raise UserError(f"{place} is no JSON: {error}") from error
    if len(sample.messages) > MAX_MESSAGES:
        raise UserError(f"{place} has more than {MAX_MESSAGES} messages")
    request, result = read_messages(sample.metadata, place)
    turns, last = _read_turns(sample, place)
    first = (
        sample.input
        if isinstance(sample.input, str)
        else "\n".join(read_text_content(each.content, sample.attachments) for each in sample.input)
    )
    own = sample.metadata if KEY in sample.metadata else {}
    facts = {"task": str(sample.id), **own, "reward": read_reward(sample.scores, score, place), "outcome": own.get("outcome")}
    if sample.error is not None and facts["outcome"] is None:
        facts |= {"outcome": "env_failed", "error_class": "sample_error", "error": read_text(sample.error.get("message"))}
    elif sample.limit is not None and facts["outcome"] is None:
        facts["outcome"] = "truncated"
    return ImportedEpisode(
        place=place,
        name=read_text(own.get("episode_id")) or f"{sample.id}-{sample.epoch}",
        turns=turns,
        request=request,
        result=result,
        facts=facts,
        prompt=first,
        last_observation=last,
        time_ns=parse_time(sample.started_at),
        finished=result is not None or KEY not in sample.metadata,
    )


def read_reward(scores: dict[str, Score] | None, name: str, place: str) -> float | None:
    """The value of a score as a number; None where there is no score, or its value is none."""
    if not scores:
        return None
    if name and name not in scores:
        raise UserError(f"{place} has no score {name}: its scores are {', '.join(sorted(scores)[:10])}")
    value = scores[name or next(iter(scores))].value
    if isinstance(value, str):
        try:
            return GRADES.get(value, GRADES.get(value.lower())) if not value[-1:].isdigit() else read_number(float(value))
        except ValueError:
            return None
    return read_number(value)


def _read_turns(sample: Sample, place: str) -> tuple[list[ImportedTurn], str]:
    """Turns, and the text after the last of them."""
    turns: list[ImportedTurn] = []
    shown: list[ChatMessage] = []
    for message in sample.messages:
        facts = _get_facts(message.metadata)
        if message.role != "assistant" or facts.get("shown") is True:
            shown.append(read_message(message, facts, sample.attachments))
            continue
        turn = ImportedTurn(
            messages=shown, text=read_text_content(message.content, sample.attachments), tool_calls=read_calls(message, facts)
        )
        shown = []
        if read_turn_facts(turn, facts, place) is not None:
            _add_tokens(turn, facts, place)
        turns.append(turn)
    last = shown[-1].content if shown else ""
    return turns, last if isinstance(last, str) else ""


def _add_tokens(turn: ImportedTurn, facts: dict[str, Any], place: str) -> None:
    known = {name: facts[name] for name in WrittenTokens.__struct_fields__ if name in facts}
    try:
        found = msgspec.convert(known, WrittenTokens)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: what stands beside turn {facts['turn']} is not what fleetbus writes: {error}") from error
    turn.segment, turn.origin, turn.tools = found.segment, found.origin, found.tools
    if found.prompt_delta_token_ids is not None and found.completion_token_ids:
        turn.tokens = ImportedTokens(
            prompt_delta=found.prompt_delta_token_ids, sampled=found.completion_token_ids, logprobs=found.logprobs
        )


def _get_facts(metadata: dict[str, Any] | None) -> dict[str, Any]:
    own = (metadata or {}).get(KEY)
    return own if isinstance(own, dict) else {}
