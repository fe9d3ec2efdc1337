"""An episode of a foreign file on its way into a recording: what was said, what is known of its tokens, how it was graded."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus_schemas import (
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    FinishReason,
    SegmentOrigin,
    ShownImage,
    ToolCall,
    ToolSpec,
    VersionSpan,
)


class ImportedTokens(msgspec.Struct, kw_only=True):
    """Tokens of one answer. ``prompt_delta`` are the ids that the sequence grew by before it; ``logprobs`` may be unknown."""

    prompt_delta: list[int]
    sampled: list[int]
    logprobs: list[float] | None = None


class ImportedTurn(msgspec.Struct, kw_only=True):
    """One answer of the policy and what it was shown before. ``tokens`` is None where the file has text alone; ``seat`` is who
    answered, in an episode with seats that fleetbus wrote."""

    messages: list[ChatMessage]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    tokens: ImportedTokens | None = None
    segment: int = 0
    origin: SegmentOrigin | None = None
    versions: tuple[VersionSpan, ...] = ()
    images: tuple[ShownImage, ...] = ()
    finish_reason: FinishReason = "stop"
    tool_call_errors: tuple[str, ...] = ()
    worker: str = ""
    seat: str = ""
    time_ns: int = 0


class ImportedEpisode(msgspec.Struct, kw_only=True):
    """``place`` is its file, or a line of it, for messages; ``name`` the id that it asks for. ``request`` and ``result`` are
    there if fleetbus wrote the file; of others ``facts`` say what is known: task, env, reward, outcome, policy.
    ``finished`` is False for one that had no result yet."""

    place: str
    name: str
    turns: list[ImportedTurn]
    request: EpisodeRequested | None = None
    result: EpisodeFinished | None = None
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    prompt: str = ""
    last_observation: str = ""
    time_ns: int = 0
    finished: bool = True


def describe_missing(turns: list[ImportedTurn]) -> str:
    """One line on what is not known of the tokens, empty if all is."""
    if any(turn.tokens is None for turn in turns):
        return "imported without token ids: it can be graded again, and not trained on"
    if any(turn.tokens is not None and turn.tokens.logprobs is None for turn in turns):
        return "imported without log-probabilities: they stand as 0"
    return ""
