"""Token sequences found again from whole prompts: which part of a prompt is new, and where another segment begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from fleetbus.errors import UserError
from fleetbus.interchange.imported import ImportedTokens, ImportedTurn
from fleetbus_schemas import NEW_ROOT, SegmentOrigin


class WithPrompt(Protocol):
    """A turn with the ids of its whole prompt."""

    turn: ImportedTurn
    trajectory: int
    origin: SegmentOrigin | None
    prompt: list[int] | None
    sampled: list[int] | None
    logprobs: list[float] | None


def place_tokens(found: Sequence[WithPrompt], place: str) -> list[ImportedTurn]:
    """The turns in order, each with its segment and what its prompt adds. Raises `UserError` for prompts that do not begin
    with what their segment keeps."""
    whole = all(read.prompt and read.sampled for read in found)
    sequences: list[list[int]] = []
    segments: dict[int, int] = {}
    for number, read in enumerate(found):
        turn, prompt = read.turn, (read.prompt or []) if whole else []
        current = segments.get(read.trajectory)
        goes_on = current is not None and (not whole or prompt[: len(sequences[current])] == sequences[current])
        if current is None or not goes_on:
            segment = segments[read.trajectory] = len(sequences)
            turn.origin = _find_origin(read, prompt, current, sequences) if segment else None
            sequences.append(_take_kept(turn.origin, sequences, prompt, f"{place}, turn {number}", whole=whole))
        turn.segment = segments[read.trajectory]
        sequence = sequences[turn.segment]
        if whole:
            _check_lengths(read, f"{place}, turn {number}")
            sampled = read.sampled or []
            turn.tokens = ImportedTokens(prompt_delta=prompt[len(sequence) :], sampled=sampled, logprobs=read.logprobs)
            sequences[turn.segment] = prompt + sampled
    return [read.turn for read in found]


def _find_origin(read: WithPrompt, prompt: list[int], current: int | None, sequences: Sequence[list[int]]) -> SegmentOrigin:
    """The origin that was written; without one another trajectory is a sub-agent's, and a prompt that does not go on keeps what
    it has in common with the last one."""
    if current is None:
        return read.origin or SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")
    pairs = zip(sequences[current], prompt, strict=False)
    kept = min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(prompt) - 1)
    return SegmentOrigin(parent=current if kept > 0 else NEW_ROOT, kept=max(kept, 0), reason="history_edited")


def _take_kept(
    origin: SegmentOrigin | None, sequences: Sequence[list[int]], prompt: list[int], place: str, *, whole: bool
) -> list[int]:
    if origin is None or origin.parent == NEW_ROOT or not whole:
        return []
    if not 0 <= origin.parent < len(sequences):
        raise UserError(f"{place} leaves segment {origin.parent}, which was not begun before it")
    kept = sequences[origin.parent][: max(origin.kept, 0)]
    if prompt[: len(kept)] != kept:
        raise UserError(f"{place}: its prompt_token_ids do not begin with the {origin.kept} tokens that its segment keeps")
    return kept


def _check_lengths(read: WithPrompt, place: str) -> None:
    if read.logprobs is not None and len(read.logprobs) != len(read.sampled or ()):
        raise UserError(f"{place}: {len(read.sampled or ())} completion_token_ids have {len(read.logprobs)} logprobs")
