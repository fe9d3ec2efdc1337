"""The protocol of an engine: tokens in, tokens out, with log-probabilities and the version that made each of them."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from fleetbus.core.text.tool_formats import ParsedResponse
from fleetbus_schemas import (
    ChatMessage,
    EngineLoad,
    FinishReason,
    PolicyPublished,
    SamplingSettings,
    SegmentReason,
    ShownImage,
    ToolSpec,
    VersionSpan,
)
from fleetbus_schemas.episode import DISTORTING
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.weights.file import WeightsRejected

__all__ = [
    "EngineFailed",
    "Generation",
    "GenerationRequest",
    "ImageSource",
    "LoadedSampler",
    "PromptDelta",
    "RequestRefused",
    "Sampler",
    "SamplerStats",
    "Template",
    "WeightsRejected",
]


def list_distorting(sampling: SamplingSettings, names: Collection[str] = DISTORTING) -> list[str]:
    """Settings that make another distribution than the policy's at its temperature, as ``name = value``."""
    neutral = SamplingSettings()
    return [f"{name} = {getattr(sampling, name):g}" for name in names if getattr(sampling, name) != getattr(neutral, name)]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to be sampled: ``ids`` is the whole token history including this turn's prompt delta.

    ``cache_key`` names the episode, so that keys and values of its history may be kept between turns. ``seed`` makes the
    sampled tokens repeatable under the same weights, beside any other load. ``max_tokens`` is at least 1. ``trained``
    is False where nothing will ever be trained on the answer (evaluation): an engine without log-probabilities may answer.
    ``images`` are those that ``ids`` show, in order; only engines that see get any. ``segment`` distinguishes the sequences of
    one episode from each other; one that begins keeps the first tokens of its ``parent``, so its keys and values serve.
    """

    cache_key: str
    ids: Sequence[int]
    sampling: SamplingSettings
    stop_ids: frozenset[int]
    max_tokens: int
    seed: int
    trained: bool = True
    images: tuple[PlacedImage, ...] = ()
    segment: int = 0
    parent: int | None = None

    @property
    def history_key(self) -> str:
        """Names the sequence that this turn extends."""
        return name_history(self.cache_key, self.segment)

    @property
    def parent_key(self) -> str | None:
        """Names the sequence whose first tokens this one shares, if it begins with this turn."""
        return None if self.parent is None else name_history(self.cache_key, self.parent)


def name_history(cache_key: str, segment: int) -> str:
    """The name of one of an episode's sequences."""
    return f"{cache_key}/{segment}" if segment else cache_key


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled sequence. The stop token, if one was sampled, is the last id. ``logprobs`` are natural logarithms under the
    softmax at the sampling temperature (at temperature 1 when greedy), before top-p is applied; NaN where the engine knows
    none, which only an untrained request may be answered with."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]


class EngineFailed(Exception):
    """The engine cannot answer this request; another worker, or this one after a restart, may."""


class RequestRefused(Exception):
    """No engine of this kind can ever answer this request, and why: its episode ends with that reason, not with a retry."""


class SamplerStats(Protocol):
    """A sampler that counts what it does. Not every sampler does."""

    @property
    def stats(self) -> Mapping[str, float]:
        """Totals that only grow, published with the heartbeat; ``prefill_tokens`` prompt tokens computed, ``cached_tokens``
        prompt tokens whose keys and values were found."""


class LoadedSampler(Protocol):
    """A sampler whose engine reports how busy it is. Not every one does."""

    @property
    def engine_load(self) -> EngineLoad:
        """As of now; the rates are left to `EngineMeter`."""


class Sampler(Protocol):
    """An engine with one policy loaded. Requests join and leave between tokens; `load` never drops one."""

    version: int
    """The version that new tokens come from."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """The engine's lifetime: enter before the first call; leaving stops it and fails what is in flight."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; cancelling frees its place. Raises `EngineFailed`."""

    async def load(self, policy: PolicyPublished) -> None:
        """Validate and swap to a published version between tokens; raises `WeightsRejected` and keeps the old one."""

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for an episode."""


class Template(Protocol):
    """The model's chat template, delta by delta, so that no token is ever tokenised twice."""

    stop_ids: frozenset[int]
    """The model's own end-of-turn ids."""

    @property
    def renders_history(self) -> bool:
        """True if each turn's prompt is `encode_conversation` of all before it, instead of the history and its continuation."""

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the whole prompt of turn 0, ending where the assistant begins."""

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Ids between the last sampled token and the assistant's next turn: the end of its turn if it was not sampled,
        the new messages, and the assistant's header."""

    def encode_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of a whole conversation, ending where the assistant begins; an assistant's message is its sampled text."""

    def explain_rendering(self, conversation: Sequence[ChatMessage], rendered: Sequence[int]) -> SegmentReason:
        """The reason why that does not begin with what was sampled."""

    def decode_text(self, ids: Sequence[int]) -> str:
        """The sampled ids as text, without the end-of-turn token; `<done>` and tool-call tags stay."""

    def parse_text(self, text: str, tools: Sequence[ToolSpec], *, calls_before: int = 0) -> ParsedResponse:
        """A sampled text in its parts; ``tools`` are those of the prompt, whose calls get ids that continue counting from
        ``calls_before`` in this episode."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its string, None if the vocabulary has no such single token."""


class PromptDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that a turn's messages become, and the images that they show, their places counted within ``ids``."""

    ids: list[int]
    images: tuple[ShownImage, ...] = ()


class ImageSource(Protocol):
    """The images that observations name, for a model that sees. Each call raises `images.reader.ImageFailed` for what will
    never be seen, and `images.reader.ImageNotFetched` for what cannot be fetched now."""

    async def expand(self, ids: list[int], messages: Sequence[ChatMessage]) -> PromptDelta:
        """``ids`` of ``messages``, with the tokens of each image where the template wrote one image token. Raises `ValueError`
        if those are not as many as the images."""

    async def load_images(self, images: Sequence[ShownImage]) -> tuple[PlacedImage, ...]:
        """The images of a whole history with their bytes."""
