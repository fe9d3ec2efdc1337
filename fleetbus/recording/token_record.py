"""The token record: of each trained token what the trainer thought of it, one file per step beside the log.

The log has what the sampler thought. A file is `MAGIC` and a deflate stream of one `StepTokens` (msgpack); its BLAKE2b-128 is
`StepTrained.token_record`, so that a file is believed if and only if the log knows it
(docs/decisions/0225-the-trainers-tokens-stand-beside-the-log.md). Pure but for reading a file.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fleetbus_schemas import Action
from fleetbus_schemas.tokens import count_tokens, unpack_ids, unpack_logprobs, unpack_mask

MAGIC = b"fbtoken1"
SUFFIX = ".fbtokens"

NOTABLE_DIFFERENCE = 0.1
"""In nats: by more than this sampler and trainer do not agree upon a token. Their arithmetic differs by less, other weights by
more."""

_LEVEL = 3


class TrainedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The N trained tokens of one episode, by a step that began with the weights of ``version``. ``places`` (``u4``) are where
    they stand among the tokens of all its turns.

    ``logprobs`` (``f4``): the trainer's log-probabilities before the tokens were first trained, at the temperature of sampling.
    ``gradients`` (``f4``): minus the derivative of the step's loss by each of these, summed over its updates: positive where
    the token was made more probable; 0 where it was clipped or masked by a correction, or has no advantage. ``clipped``: packed
    bits, set where an update clipped the ratio.
    """

    episode_id: str
    version: int
    places: bytes
    logprobs: bytes
    gradients: bytes
    clipped: bytes


class StepTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one step trained."""

    lineage: str
    step: int
    episodes: tuple[TrainedTokens, ...]


class TrainerColumns(NamedTuple):
    """`TrainedTokens` over all tokens of an episode: NaN, NaN and False of those that were not trained."""

    logprobs: list[float]
    gradients: list[float]
    clipped: list[bool]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StepTokens).decode


def build_record_path(folder: Path, lineage: str, step: int) -> Path:
    """The file of one step."""
    return folder / f"{lineage}-s{step}{SUFFIX}"


def encode_step(tokens: StepTokens) -> bytes:
    """The contents of a file."""
    return MAGIC + zlib.compress(_encode(tokens), _LEVEL)


def digest_record(contents: bytes) -> bytes:
    """BLAKE2b-128 of the contents of a file."""
    return hashlib.blake2b(contents, digest_size=16).digest()


def read_record(file: Path, digest: bytes) -> StepTokens | None:
    """The record in a file, or None if there is none or it is not the one with this digest."""
    try:
        contents = file.read_bytes()
    except (OSError, ValueError):  # a lineage of the log may have any name
        return None
    if digest_record(contents) != digest or not contents.startswith(MAGIC):
        return None
    return _decode(zlib.decompress(contents[len(MAGIC) :]))


def split_by_turn(trained: TrainedTokens | None, actions: Sequence[Action | None]) -> list[TrainerColumns]:
    """Of each turn the columns over the tokens that it sampled; empty ones if nothing is known."""
    counts = [(count_tokens(each.prompt_delta), count_tokens(each.sampled)) if each is not None else (0, 0) for each in actions]
    if trained is None:
        return [TrainerColumns([], [], []) for _ in counts]
    columns, found, end = spread_over(trained, sum(map(sum, counts))), [], 0
    for shown, sampled in counts:
        start, end = end + shown, end + shown + sampled
        found.append(TrainerColumns(columns.logprobs[start:end], columns.gradients[start:end], columns.clipped[start:end]))
    return found


def find_differing(sampler: Sequence[float], trainer: Sequence[float]) -> list[bool]:
    """True for each token that the trainer has trained and whose two log-probabilities differ notably."""
    return [abs(ours - theirs) > NOTABLE_DIFFERENCE for theirs, ours in zip(sampler, trainer, strict=False)]  # False of NaN


def spread_over(trained: TrainedTokens, count: int) -> TrainerColumns:
    """The columns over the ``count`` tokens of an episode's turns."""
    columns = TrainerColumns([math.nan] * count, [math.nan] * count, [False] * count)
    places = unpack_ids(trained.places)
    known = unpack_logprobs(trained.logprobs), unpack_logprobs(trained.gradients), unpack_mask(trained.clipped, len(places))
    for place, logprob, gradient, clipped in zip(places, *known, strict=True):
        if place < count:
            columns.logprobs[place], columns.gradients[place], columns.clipped[place] = logprob, gradient, clipped
    return columns
