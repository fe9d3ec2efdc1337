"""Finds out by asking what a server can do: its dialect, model and kind of log-probabilities, and if it takes weights."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.openai.dialects import DIALECTS, Dialect, MalformedResponse, ServerCall
from fleetbus_workers.inference.openai.model_server import ModelServer, ServerFailed

TOP_LOGPROBS = 5
SECOND_TEMPERATURE = 0.5
"""The second temperature: log-probabilities that do not move with it are those before scaling."""


async def probe(server: ModelServer, *, model: str, ids: Sequence[int], text: str) -> None:
    """Fill in ``server.state``. ``ids`` and ``text`` are any short prompt. Raises `ServerFailed`."""
    await server.check_health()
    state = server.state
    state.model = model or await server.fetch_model_name()
    request = GenerationRequest(
        cache_key="probe", ids=ids, sampling=SamplingSettings(max_tokens=1), stop_ids=frozenset(), max_tokens=1, seed=1
    )
    call = ServerCall(request=request, model=state.model, prompt_text=text, stream=False, top_logprobs=TOP_LOGPROBS)
    for dialect in DIALECTS:
        first = await server.request_once(dialect, call)
        if first is not None and _is_supported(dialect, first):
            state.dialect = dialect
            break
    else:
        raise ServerFailed(f"{server.url}: it answers neither token ids nor text; is it an OpenAI-compatible server?")
    if dialect.returns_tokens:
        second_request = msgspec.structs.replace(
            request, sampling=SamplingSettings(max_tokens=1, temperature=SECOND_TEMPERATURE)
        )
        second = await server.request_once(dialect, msgspec.structs.replace(call, request=second_request))
        state.scaled_logprobs = second is not None and _has_scaled_logprobs(dialect, first, second)
        state.takes_weights = await server.fetch_weight_label() is not None


def _is_supported(dialect: Dialect, answer: dict[str, object]) -> bool:
    try:
        piece = dialect.parse_chunk(answer)
    except (MalformedResponse, KeyError, TypeError, AttributeError):
        return False
    return len(piece.ids) == len(piece.logprobs) == 1 if dialect.returns_tokens else "choices" in answer


def _has_scaled_logprobs(dialect: Dialect, first: dict[str, object] | None, second: dict[str, object]) -> bool:
    """True if a candidate has another log-probability at the other temperature."""
    before, after = _read_top_logprobs(dialect, first or {}), _read_top_logprobs(dialect, second)
    return any(abs(before[name] - after[name]) > 1e-3 for name in before.keys() & after.keys())


def _read_top_logprobs(dialect: Dialect, answer: dict[str, Any]) -> dict[str, float]:
    logprobs = answer["choices"][0]["logprobs"]
    if dialect.name == "generate":
        content = logprobs["content"][0]
        return {str(entry["token_id"]): float(entry["logprob"]) for entry in [content, *content.get("top_logprobs", [])]}
    return {str(name): float(value) for name, value in ((logprobs.get("top_logprobs") or [{}])[0] or {}).items()}
