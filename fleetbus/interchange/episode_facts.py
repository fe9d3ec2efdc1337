"""The facts of an episode beside its conversation, as JSON-like values, and the same read back from a foreign file."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from fleetbus.errors import UserError
from fleetbus.recording.episodes import Transcript
from fleetbus.recording.redaction import is_wiped
from fleetbus_schemas import Action, EpisodeFinished, EpisodeRequested
from fleetbus_schemas.tokens import TOKEN_BYTES, count_tokens, take_tokens, unpack_logprobs

KEY = "fleetbus"
"""The key of what only fleetbus reads: ``request`` and ``result``, as messages have them."""

IN_THE_TURNS = ("actions", "loss_mask", "segments", "transcript")
"""Fields of a result that its turns say."""

NUMBERS = ("reward_components", "timings")

T = TypeVar("T")


def find_episode_id(transcript: Transcript) -> str:
    """The id that result or request have; empty for an episode with neither."""
    if transcript.result is not None:
        return transcript.result.episode_id
    return transcript.request.episode_id if transcript.request is not None else ""


def find_versions(action: Action) -> list[list[int]]:
    """Of an answer each version of the policy with the first token that it sampled and the one after the last."""
    return [[span.version, span.start, span.stop] for span in action.versions]


def has_ids(action: Action) -> bool:
    """True if all token ids of an answer are whole, and none was replaced by a redaction."""
    return not any(len(ids) % TOKEN_BYTES or is_wiped(ids) for ids in (action.prompt_delta, action.sampled))


def find_logprobs(action: Action) -> list[float] | None:
    """The log-probabilities of what was sampled; None unless there is a finite one of each token."""
    found = unpack_logprobs(take_tokens(action.logprobs, len(action.logprobs)))
    return found if len(found) == count_tokens(action.sampled) and all(map(math.isfinite, found)) else None


def build_episode_facts(transcript: Transcript, run: str) -> dict[str, Any]:
    """Reward, outcome, task and versions by their names, and request and result as they are."""
    request, result = transcript.request, transcript.result
    facts: dict[str, Any] = {"run": run, "episode_id": find_episode_id(transcript)}
    if request is not None:
        facts |= {"task": request.task.key, "env": request.task.env, "split": request.split}
        facts |= {"group_id": request.group_id, "sample_index": request.sample_index, "policy": request.policy}
    if result is not None:
        facts |= {"task": result.task_key, "env": result.env, "split": result.split, "group_id": result.group_id}
        facts |= {"outcome": result.outcome, "reward": result.reward, "policy_versions": list(result.policy_versions)}
        facts |= {"reward_components": dict(result.reward_components)} if result.reward_components else {}
        facts |= {"success": result.success} if result.success is not None else {}
        facts |= {"error_class": result.error_class, "error": result.error} if result.error_class else {}
    messages: dict[str, Any] = {"request": msgspec.to_builtins(request), "result": msgspec.to_builtins(result)}
    for field in IN_THE_TURNS if result is not None else ():
        messages["result"].pop(field, None)
    for field in NUMBERS if result is not None else ():  # JSON has no others
        known: dict[str, float] = messages["result"].get(field, {})
        messages["result"][field] = {name: value for name, value in known.items() if math.isfinite(value)}
    return {**facts, KEY: messages}


def read_messages(facts: dict[str, Any] | None, place: str) -> tuple[EpisodeRequested | None, EpisodeFinished | None]:
    """Request and result that fleetbus wrote; None where it did not. Raises `UserError` for what are none."""
    own = (facts or {}).get(KEY)
    if not isinstance(own, dict):
        return None, None
    return _convert(own.get("request"), EpisodeRequested, place), _convert(own.get("result"), EpisodeFinished, place)


def _convert(value: object, kind: type[T], place: str) -> T | None:
    try:
        return msgspec.convert(value, kind | None)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{place}: what fleetbus wrote of it is no {kind.__name__}: {error}") from error


def read_number(value: object) -> float | None:
    """A finite number, None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_text(value: object, most: int = 200) -> str:
    """Text of a bounded length, empty for anything else."""
    return value[:most] if isinstance(value, str) else ""
