"""Builds the request for a turn and reads its stream, for each kind of server. Pure: JSON objects in and out.

``generate``     vLLM's ``/inference/v1/generate`` (server option ``--enable-scale-out``): ids in, ids and log-probabilities
                 out, and the label of the weights that made them.
``completions``  ``/v1/completions`` with ``return_token_ids``: the same without labels.
``text``         ``/v1/completions`` of other servers: text in, text out. Good for evaluation, never for training.
``standard``     the same for a server that takes no setting beyond the protocol's.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from fleetbus_workers.inference.base import GenerationRequest

SEED_MASK = (1 << 63) - 1
"""Servers take seeds as signed 64-bit integers."""


ALL_TOKENS = -1
"""How servers spell a top-k without a limit: vLLM, SGLang and llama.cpp alike."""

NOT_STANDARD = ("top_k", "min_p", "repetition_penalty")
"""Settings that a server of the bare protocol does not take."""


class MalformedResponse(Exception):
    """An answer that is not what the dialect promises."""


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a stream: what it adds. ``finish`` is empty until the last one; ``labels`` are those of all the weights that
    made the answer, if the server names them."""

    ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    finish: str = ""
    labels: tuple[str, ...] = ()
    cached_tokens: int = 0


class ServerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a server: a request, continued after ``generated_ids`` ids, in at most ``max_tokens`` more."""

    request: GenerationRequest
    model: str
    generated_ids: Sequence[int] = ()
    prompt_text: str = ""
    stops: Sequence[str] = ()
    salt: str = ""
    stream: bool = True
    top_logprobs: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.request.ids, *self.generated_ids]

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens - len(self.generated_ids)

    @property
    def sampling(self) -> dict[str, object]:
        """The sampling settings that all dialects name alike. Nothing is left to a server's own defaults, which it may take
        from the model's ``generation_config``."""
        settings = self.request.sampling
        return self.standard_sampling | {
            "top_k": settings.top_k or ALL_TOKENS,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
        }

    @property
    def standard_sampling(self) -> dict[str, object]:
        """The part of it that the protocol itself has."""
        settings = self.request.sampling
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "presence_penalty": settings.presence_penalty,
            "frequency_penalty": settings.frequency_penalty,
            "max_tokens": self.max_tokens,
            "seed": self.request.seed & SEED_MASK,
        }


class Dialect(Protocol):
    """One way to talk. ``returns_tokens`` if it gives token ids with log-probabilities."""

    name: str
    path: str
    returns_tokens: bool

    def build_body(self, call: ServerCall) -> dict[str, Any]:
        """The JSON body of the request."""

    def parse_chunk(self, chunk: dict[str, Any]) -> StreamChunk:
        """One JSON object of the answer; raises `MalformedResponse`."""


class GenerateDialect:
    """Ids in, ids and log-probabilities out, and the label of the weights that made them."""

    name, path, returns_tokens = "generate", "/inference/v1/generate", True

    def build_body(self, call: ServerCall) -> dict[str, Any]:
        parameters = {
            **call.sampling,
            "stop_token_ids": sorted(call.request.stop_ids),
            "logprobs": call.top_logprobs,
            "detokenize": False,
        }
        salt_field = {"cache_salt": call.salt} if call.salt else {}
        return {"model": call.model, "token_ids": call.ids, "sampling_params": parameters, "stream": call.stream, **salt_field}

    def parse_chunk(self, chunk: dict[str, Any]) -> StreamChunk:
        choice = _get_choice(chunk)
        if choice is None:
            return StreamChunk(cached_tokens=_read_cached_tokens(chunk))
        content = (choice.get("logprobs") or {}).get("content") or []
        return StreamChunk(
            ids=_parse_ids(choice.get("token_ids")),
            logprobs=[_parse_number(entry.get("logprob")) for entry in content],
            finish=choice.get("finish_reason") or "",
            labels=tuple(str(span["version"]) for span in choice.get("weight_versions") or ()),
            cached_tokens=_read_cached_tokens(chunk),
        )


class CompletionsDialect:
    """Completions with vLLM's additions: ids in, ids and log-probabilities out."""

    name, path, returns_tokens = "completions", "/v1/completions", True

    def build_body(self, call: ServerCall) -> dict[str, Any]:
        body = {
            "model": call.model,
            "prompt": call.ids,
            **call.sampling,
            "stop_token_ids": sorted(call.request.stop_ids),
            "logprobs": call.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream": call.stream,
        }
        return body | ({"cache_salt": call.salt} if call.salt else {})

    def parse_chunk(self, chunk: dict[str, Any]) -> StreamChunk:
        choice = _get_choice(chunk)
        if choice is None:
            return StreamChunk(cached_tokens=_read_cached_tokens(chunk))
        logprobs = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if ids is None:
            ids = [_parse_token(token) for token in logprobs.get("tokens") or ()]
        return StreamChunk(
            ids=_parse_ids(ids),
            logprobs=[_parse_number(value) for value in logprobs.get("token_logprobs") or ()],
            text=choice.get("text") or "",
            finish=choice.get("finish_reason") or "",
            cached_tokens=_read_cached_tokens(chunk),
        )


class TextDialect:
    """Completions of any server: text in, text out."""

    name, path, returns_tokens = "text", "/v1/completions", False

    def build_body(self, call: ServerCall) -> dict[str, Any]:
        return {
            "model": call.model,
            "prompt": call.prompt_text,
            **call.sampling,
            "stop": list(call.stops)[:4],  # the protocol's limit
            "stream": call.stream,
        }

    def parse_chunk(self, chunk: dict[str, Any]) -> StreamChunk:
        choice = _get_choice(chunk)
        if choice is None:
            return StreamChunk()
        return StreamChunk(text=choice.get("text") or "", finish=choice.get("finish_reason") or "")


class StandardDialect(TextDialect):
    """Completions with nothing but the protocol's own settings; the others are the server's."""

    name = "standard"

    def build_body(self, call: ServerCall) -> dict[str, Any]:
        return {name: value for name, value in super().build_body(call).items() if name not in NOT_STANDARD}


DIALECTS: tuple[Dialect, ...] = (GenerateDialect(), CompletionsDialect(), TextDialect(), StandardDialect())
"""The best first."""


def _get_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    if "error" in chunk:
        raise MalformedResponse(format_error(chunk))
    choices = chunk.get("choices")
    if not choices:
        return None  # a chunk with usage alone
    choice: dict[str, object] = choices[0]
    return choice


def format_error(answer: Any) -> str:
    """The words of an error answer, in one bounded line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _parse_ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise MalformedResponse("token ids are not all integers from 0 on")
    return list(ids)


def _parse_token(token: object) -> int:
    """``token_id:17``, as servers spell tokens when they are asked for ids."""
    digits = str(token).removeprefix("token_id:")
    if not digits.isdecimal():
        raise MalformedResponse(f"{str(token)[:40]!r} is a text where a token id should be")
    return int(digits)


def _parse_number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise MalformedResponse("a log-probability is not a number")
    return float(value)


def _read_cached_tokens(chunk: dict[str, Any]) -> int:
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
