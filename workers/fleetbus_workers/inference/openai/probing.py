"""What a server can do, found out by asking: its dialect, model and kind of log-probabilities, and if it takes weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.openai.dialects import DIALECTS, Ask, Dialect, Unreadable
from fleetbus_workers.inference.openai.server import Server, ServerTrouble

CANDIDATES = 5
WARM = 0.5
"""The second temperature: log-probabilities that do not move with it are those before scaling."""


async def probe(server: Server, *, model: str, ids: Sequence[int], text: str) -> None:
    """Fill in ``server.state``. ``ids`` and ``text`` are any short prompt. Raises `ServerTrouble`."""
    await server.is_alive()
    state = server.state
    state.model = model or await server.model_name()
    request = GenerationRequest(
        cache_key="probe", ids=ids, sampling=SamplingSettings(max_tokens=1), stop_ids=frozenset(), max_tokens=1, seed=1
    )
    ask = Ask(request=request, model=state.model, prompt_text=text, stream=False, candidates=CANDIDATES)
    for dialect in DIALECTS:
        first = await server.ask_once(dialect, ask)
        if first is not None and _speaks(dialect, first):
            state.dialect = dialect
            break
    else:
        raise ServerTrouble(f"{server.url}: it answers neither token ids nor text; is it an OpenAI-compatible server?")
    if dialect.exact:
        warm = msgspec.structs.replace(request, sampling=SamplingSettings(max_tokens=1, temperature=WARM))
        second = await server.ask_once(dialect, msgspec.structs.replace(ask, request=warm))
        state.scaled_logprobs = second is not None and _moved(dialect, first, second)
        state.takes_weights = await server.weight_label() is not None


def _speaks(dialect: Dialect, answer: dict[str, Any]) -> bool:
    try:
        piece = dialect.piece(answer)
    except (Unreadable, KeyError, TypeError, AttributeError):
        return False
    return len(piece.ids) == len(piece.logprobs) == 1 if dialect.exact else "choices" in answer


def _moved(dialect: Dialect, first: dict[str, Any] | None, second: dict[str, Any]) -> bool:
    """True if a candidate has another log-probability at the other temperature."""
    before, after = _candidates(dialect, first or {}), _candidates(dialect, second)
    return any(abs(before[name] - after[name]) > 1e-3 for name in before.keys() & after.keys())


def _candidates(dialect: Dialect, answer: dict[str, Any]) -> dict[str, float]:
    logprobs = answer["choices"][0]["logprobs"]
    if dialect.name == "generate":
        content = logprobs["content"][0]
        return {str(entry["token_id"]): float(entry["logprob"]) for entry in [content, *content.get("top_logprobs", [])]}
    return {str(name): float(value) for name, value in ((logprobs.get("top_logprobs") or [{}])[0] or {}).items()}
