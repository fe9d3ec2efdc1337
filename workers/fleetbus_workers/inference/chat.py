"""Servers of chat completions, of whatever model: for seats that are not trained, as a user simulator. Messages in, text out.

An answer that does not come, or cannot be read, is a failure of the turn, never a reward. Below it is one HTTP server.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from fleetbus.errors import UserError
from fleetbus_schemas import MAX_MESSAGE_BYTES, PolicyPublished, VersionSpan
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, RequestRefused, WeightsRejected
from fleetbus_workers.inference.chat_transcript import ChatTranscript, format_answer, read_conversation
from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.openai.model_server import SERVER_KEY, ModelServer, ServerFailed, parse_urls

PATH = "/v1/chat/completions"

NEW_LIMIT = "max_completion_tokens"
"""The name that newer models of OpenAI want for ``max_tokens``; servers of others know the old one alone."""

ANSWER_SECONDS = 300.0
"""For one whole answer: a server that says a byte now and then is not silent."""

MAX_TRIES = 4
FIRST_PAUSE_SECONDS = 0.5

MAX_CHARS = MAX_MESSAGE_BYTES // 9
"""Of one answer: a byte of it is eight more as an id with its log-probability. A longer one fits no Action."""


class ChatSampler:
    """`Sampler` of version 0 for servers at ``urls``, tried in turn. A request to be trained on is refused."""

    version = 0

    def __init__(self, urls: Sequence[str], *, model: str = "", key: str = "", slots: int = 64) -> None:
        if not urls:
            raise UserError("the engine chat needs inference.urls: base URLs of servers, separated by commas")
        self._servers = [ModelServer(url, key=key, connections=slots) for url in dict.fromkeys(urls)]
        self._model = model
        self._transcript = ChatTranscript()
        self._first = 0
        self._limit = "max_tokens"

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Connections are closed on leaving."""
        try:
            yield
        finally:
            with anyio.move_on_after(5, shield=True):
                for server in self._servers:
                    await server.close()

    async def find_model(self) -> None:
        """Ask for the model's name, if none was given. Raises `UserError` if no server says."""
        problems = []
        for server in self._servers if not self._model else ():
            try:
                self._model = await server.fetch_model_name()
            except ServerFailed as failed:
                problems.append(str(failed))
            else:
                return
        if problems:
            raise UserError(f"no server names its model (inference.served_model_name): {'; '.join(problems)}")

    async def generate(self, request: GenerationRequest) -> Generation:
        """One answer, as bytes and `fleetbus_workers.inference.chat_transcript.END`. Raises `RequestRefused` or
        `EngineFailed`."""
        if request.trained:
            raise RequestRefused("a server of chat completions tells no token ids: nothing can be trained on its answers")
        try:
            return await self._ask(request)
        except RequestRefused as refused:
            if self._limit == NEW_LIMIT or NEW_LIMIT not in str(refused):
                raise
        self._limit = NEW_LIMIT
        return await self._ask(request)

    async def _ask(self, request: GenerationRequest) -> Generation:
        body = self._build_body(request)
        for number in range(MAX_TRIES):
            server = self._servers[self._first % len(self._servers)]
            try:
                with anyio.fail_after(ANSWER_SECONDS):
                    choice = _read_choice(await server.request_json(PATH, body))
                text = format_answer(choice.get("message"))
            except (ServerFailed, TimeoutError, ValueError) as failed:
                self._first += 1
                problem = f"{number + 1} tries failed, the last: {str(failed) or 'no whole answer in time'}"
                await anyio.sleep(FIRST_PAUSE_SECONDS * 2**number)
                continue
            if len(text) > MAX_CHARS:
                raise RequestRefused(f"{server.url}: the answer has {len(text)} characters; an Action holds {MAX_CHARS}")
            ids = self._transcript.encode_text(text)
            return Generation(
                ids=ids,
                logprobs=[math.nan] * len(ids),
                finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
                versions=(VersionSpan(version=self.version, start=0, stop=len(ids)),),
            )
        raise EngineFailed(problem)

    def _build_body(self, request: GenerationRequest) -> dict[str, Any]:
        try:
            conversation = read_conversation(request.ids)
        except ValueError as error:
            raise RequestRefused(f"the conversation cannot be sent: {error}") from error
        sampling = request.sampling
        body: dict[str, Any] = {"model": self._model, "messages": conversation.messages, self._limit: sampling.max_tokens}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed % (1 << 31)}
        if conversation.tools:
            body["tools"] = conversation.tools
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return body

    async def load(self, policy: PolicyPublished) -> None:
        """Raises `WeightsRejected`: a server's model stays as it is."""
        raise WeightsRejected(f"version {policy.version}: a server of chat completions takes no weights")

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""


def _read_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("the answer has no choice")
    return choices[0]


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[ChatSampler]:
    """See `fleetbus_workers.inference.engine_context`. The servers were asked for the name of their model."""
    settings = context.configuration.inference
    key = os.environ.get(SERVER_KEY, "")
    sampler = ChatSampler(parse_urls(settings.urls), model=settings.served_model_name, key=key, slots=settings.slots)
    await sampler.find_model()
    yield sampler
