"""How a turn is asked for and how its stream is read, for each kind of server. Pure: JSON objects in and out.

``generate``     vLLM's ``/inference/v1/generate`` (server option ``--enable-scale-out``): ids in, ids and log-probabilities
                 out, and the label of the weights that made them.
``completions``  ``/v1/completions`` with ``return_token_ids``: the same without labels.
``text``         ``/v1/completions`` of any server: text in, text out. Good for evaluation, never for training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from fleetbus_workers.inference.base import GenerationRequest

SEED_MASK = (1 << 63) - 1
"""Servers take seeds as signed 64-bit integers."""


class Unreadable(Exception):
    """An answer that is not what the dialect promises."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a stream: what it adds. ``finish`` is empty until the last one; ``labels`` are those of all the weights that
    made the answer, if the server names them."""

    ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    finish: str = ""
    labels: tuple[str, ...] = ()
    cached_tokens: int = 0


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a server: a request, continued after ``so_far`` ids, in at most ``max_tokens`` more."""

    request: GenerationRequest
    model: str
    so_far: Sequence[int] = ()
    prompt_text: str = ""
    stops: Sequence[str] = ()
    salt: str = ""
    stream: bool = True
    candidates: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.request.ids, *self.so_far]

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens - len(self.so_far)

    @property
    def sampling(self) -> dict[str, Any]:
        """What all dialects say in the same words."""
        settings = self.request.sampling
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.request.seed & SEED_MASK,
        }


class Dialect(Protocol):
    """One way to talk. ``exact`` if it gives token ids with log-probabilities."""

    name: str
    path: str
    exact: bool

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body of the request."""

    def piece(self, chunk: dict[str, Any]) -> Piece:
        """One JSON object of the answer; raises `Unreadable`."""


class Generate:
    """Ids in, ids and log-probabilities out, and the label of the weights that made them."""

    name, path, exact = "generate", "/inference/v1/generate", True

    def body(self, ask: Ask) -> dict[str, Any]:
        parameters = {
            **ask.sampling,
            "stop_token_ids": sorted(ask.request.stop_ids),
            "logprobs": ask.candidates,
            "detokenize": False,
        }
        salted = {"cache_salt": ask.salt} if ask.salt else {}
        return {"model": ask.model, "token_ids": ask.ids, "sampling_params": parameters, "stream": ask.stream, **salted}

    def piece(self, chunk: dict[str, Any]) -> Piece:
        choice = _choice(chunk)
        if choice is None:
            return Piece(cached_tokens=_cached(chunk))
        content = (choice.get("logprobs") or {}).get("content") or []
        return Piece(
            ids=_ids(choice.get("token_ids")),
            logprobs=[_number(entry.get("logprob")) for entry in content],
            finish=choice.get("finish_reason") or "",
            labels=tuple(str(span["version"]) for span in choice.get("weight_versions") or ()),
            cached_tokens=_cached(chunk),
        )


class Completions:
    """Completions with vLLM's additions: ids in, ids and log-probabilities out."""

    name, path, exact = "completions", "/v1/completions", True

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {
            "model": ask.model,
            "prompt": ask.ids,
            **ask.sampling,
            "stop_token_ids": sorted(ask.request.stop_ids),
            "logprobs": ask.candidates,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream": ask.stream,
        }
        return body | ({"cache_salt": ask.salt} if ask.salt else {})

    def piece(self, chunk: dict[str, Any]) -> Piece:
        choice = _choice(chunk)
        if choice is None:
            return Piece(cached_tokens=_cached(chunk))
        logprobs = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if ids is None:
            ids = [_spelled(token) for token in logprobs.get("tokens") or ()]
        return Piece(
            ids=_ids(ids),
            logprobs=[_number(value) for value in logprobs.get("token_logprobs") or ()],
            text=choice.get("text") or "",
            finish=choice.get("finish_reason") or "",
            cached_tokens=_cached(chunk),
        )


class TextOnly:
    """Completions of any server: text in, text out."""

    name, path, exact = "text", "/v1/completions", False

    def body(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": ask.model,
            "prompt": ask.prompt_text,
            **ask.sampling,
            "stop": list(ask.stops)[:4],  # the protocol's limit
            "stream": ask.stream,
        }

    def piece(self, chunk: dict[str, Any]) -> Piece:
        choice = _choice(chunk)
        if choice is None:
            return Piece()
        return Piece(text=choice.get("text") or "", finish=choice.get("finish_reason") or "")


DIALECTS: tuple[Dialect, ...] = (Generate(), Completions(), TextOnly())
"""The best first."""


def _choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    if "error" in chunk:
        raise Unreadable(error_text(chunk))
    choices = chunk.get("choices")
    if not choices:
        return None  # a chunk with usage alone
    choice: dict[str, Any] = choices[0]
    return choice


def error_text(answer: Any) -> str:
    """The words of an error answer, in one bounded line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise Unreadable("token ids are not all integers from 0 on")
    return list(ids)


def _spelled(token: Any) -> int:
    """``token_id:17``, as servers spell tokens when they are asked for ids."""
    digits = str(token).removeprefix("token_id:")
    if not digits.isdecimal():
        raise Unreadable(f"{str(token)[:40]!r} is a text where a token id should be")
    return int(digits)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Unreadable("a log-probability is not a number")
    return float(value)


def _cached(chunk: dict[str, Any]) -> int:
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
