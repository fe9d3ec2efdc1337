"""An engine and a template without a model: for benchmarks, simulations and tests of everything around them.

Tokens are made from the seed alone, so two workers given the same turn answer alike.
"""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from fleetbus.core.text.tool_formats import HERMES, ParsedResponse, parse_response
from fleetbus_schemas import ChatMessage, PolicyPublished, SegmentReason, ToolSpec, VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest

VOCABULARY = 256
STOP = 1


class StubSampler:
    """The base of samplers without a model: every version is taken as it comes, and nothing is kept."""

    version = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()
        yield

    async def load(self, policy: PolicyPublished) -> None:
        await anyio.lowlevel.checkpoint()
        self.version = policy.version

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""


class ScriptedSampler(StubSampler):
    """Answers every turn with ``tokens`` tokens, after ``delay(request)`` seconds if given."""

    def __init__(self, *, tokens: int = 8, delay: Callable[[GenerationRequest], float] | None = None) -> None:
        self._tokens = tokens
        self._delay = delay

    async def generate(self, request: GenerationRequest) -> Generation:
        version = self.version
        if self._delay is not None:
            await anyio.sleep(self._delay(request))
        count = min(self._tokens, request.max_tokens)
        draw = random.Random(request.seed)
        ids = [2 + draw.randrange(VOCABULARY - 2) for _ in range(count - 1)] + [STOP]
        return Generation(
            ids=ids,
            logprobs=[-1.0] * count,
            finish_reason="stop",
            versions=(VersionSpan(version=version, start=0, stop=count),),
        )


class ScriptedTemplate:
    """One token per UTF-8 byte, no vocabulary, no special tokens but one that ends a turn."""

    stop_ids: frozenset[int] = frozenset({STOP})
    renders_history = False

    def encode_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        return self.encode_prompt(messages, tools)

    def explain_rendering(self, conversation: Sequence[ChatMessage], rendered: Sequence[int]) -> SegmentReason:
        return "history_edited"

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        return self.encode_continuation((), messages)

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        return [byte for message in messages if isinstance(message.content, str) for byte in message.content.encode()]

    def decode_text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def parse_text(self, text: str, tools: Sequence[ToolSpec], *, calls_before: int = 0) -> ParsedResponse:
        return parse_response(text, HERMES, tools)

    def token_to_id(self, token: str) -> int | None:
        return None
