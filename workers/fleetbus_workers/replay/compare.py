"""Two messages compared by value, field by field; what may differ is declared here and nowhere else. Pure.

Fields of bytes that hold arrays (`fleetbus_schemas.tokens`) are compared as numbers, so that a difference names the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from fleetbus_schemas import Message
from fleetbus_schemas.tokens import unpack_ids, unpack_logprobs

VOLATILE: Mapping[str, frozenset[str]] = {
    "Observation": frozenset({"attempt", "hop", "environment_lane", "action_sequence", "ahead"}),
    "EpisodeFinished": frozenset(
        {"attempt", "attempts", "worker", "timings", "actions.lane", "error_location", "note", "opens", "traceback"}
    ),
    "Action": frozenset({"worker", "lane", "hop", "observation_sequence", "seconds_queued", "seconds_generating"}),
    "EpisodeRequested": frozenset({"deadline_ns", "earliest_sequence"}),
    "LineageStarted": frozenset({"worker", "nonce", "floor", "settings"}),
    "PolicyPublished": frozenset({"uri"}),
    "StepTrained": frozenset({"token_record", "metrics.seconds*", "metrics.staleness_in_*", "metrics.reward_judge"}),
    "CheckpointStored": frozenset({"file", "floor", "first_open_group", "sha256"}),
    "EvaluationFinished": frozenset(),
    "TrainingFinished": frozenset(),
}
"""Fields that name a worker, a lane, a place, a moment or a duration: another worker on another day has others. A final ``*``
stands for any ending."""

ADDED: Mapping[str, frozenset[str]] = {
    "EpisodeFinished": frozenset({"success", "info", "last_observation"}),
    "StepTrained": frozenset({"digests", "differences"}),
    "EvaluationFinished": frozenset({"successes", "tasks"}),
}
"""Fields that earlier workers did not fill: where a recording has none, nothing is compared."""

UNSAID: tuple[object, ...] = (None, {}, "", (), -1, 0)
"""Values of such fields in a recording that has none."""

LOGPROB_TOLERANCE = 1e-3
"""Natural log-probabilities of the same token may differ by this much: batches add up in other orders."""

METRIC_TOLERANCE = 1e-4
"""Relative tolerance of a step's metrics."""

_ARRAYS: Mapping[str, Callable[[bytes], Sequence[float]]] = {
    "prompt_delta": unpack_ids,
    "sampled": unpack_ids,
    "logprobs": unpack_logprobs,
}


_CAUSES: Mapping[str, int] = {"prompt_delta": 0, "sampled": 1}
"""Of the fields that differ, those that make the others differ are named first."""


class Found(NamedTuple):
    """The first field that differs, and both values in short."""

    field: str
    recorded: str
    replayed: str


def first_difference(
    recorded: Message, replayed: Message, *, ignored: frozenset[str] = frozenset(), tolerance: float = LOGPROB_TOLERANCE
) -> Found | None:
    """The first field by which ``replayed`` differs, None if it does not; ``ignored`` are further ``Type.field`` names."""
    kind = type(recorded).__name__
    if type(replayed) is not type(recorded):
        return Found("type", kind, type(replayed).__name__)
    return _comparison(kind, ignored, tolerance).structs("", recorded, replayed)


@lru_cache(maxsize=64)
def _comparison(kind: str, ignored: frozenset[str], tolerance: float) -> _Comparison:
    own = {name.partition(".")[2] for name in ignored if name.partition(".")[0] in (kind, "*")}
    return _Comparison(VOLATILE.get(kind, frozenset()) | own, tolerance)


@lru_cache(maxsize=256)
def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Fields in the order in which a difference is named."""
    return tuple(sorted(kind.__struct_fields__, key=lambda name: _CAUSES.get(name, len(_CAUSES))))


class _Comparison:
    def __init__(self, volatile: frozenset[str], tolerance: float) -> None:
        self._volatile = volatile
        self._prefixes = [name[:-1] for name in volatile if name.endswith("*")]
        self._tolerance = tolerance

    def values(self, path: str, recorded: Any, replayed: Any) -> Found | None:
        if recorded == replayed or self._is_volatile(path):
            return None
        if isinstance(recorded, msgspec.Struct) and type(recorded) is type(replayed):
            return self.structs(path, recorded, replayed)
        if isinstance(recorded, dict) and isinstance(replayed, dict):
            return self._mappings(path, recorded, replayed)
        if isinstance(recorded, (list, tuple)) and isinstance(replayed, (list, tuple)):
            return self._sequences(path, recorded, replayed)
        if isinstance(recorded, bytes) and isinstance(replayed, bytes) and path in _ARRAYS:
            return self._sequences(path, _ARRAYS[path](recorded), _ARRAYS[path](replayed))
        if self._same(path, recorded, replayed):
            return None
        return Found(path, _shown(recorded), _shown(replayed))

    def structs(self, path: str, recorded: msgspec.Struct, replayed: msgspec.Struct) -> Found | None:
        for name in _fields(type(recorded)):
            one, other = getattr(recorded, name), getattr(replayed, name)
            is_added = name in ADDED.get(type(recorded).__name__, ()) and one in UNSAID
            if one != other and not is_added:
                found = self.values(f"{path}.{name}" if path else name, one, other)
                if found is not None:
                    return found
        return None

    def _mappings(self, path: str, recorded: dict[object, object], replayed: dict[object, object]) -> Found | None:
        absent = object()
        further = () if path == "metrics" else (key for key in replayed if key not in recorded)  # metrics are only ever added
        for key in [*recorded, *further]:
            inner = f"{path}.{key}"
            one, other = recorded.get(key, absent), replayed.get(key, absent)
            if self._is_volatile(inner):
                continue
            if one is absent or other is absent:
                return Found(inner, *("(absent)" if each is absent else _shown(each) for each in (one, other)))
            found = self.values(inner, one, other)
            if found is not None:
                return found
        return None

    def _sequences(self, path: str, recorded: Sequence[object], replayed: Sequence[object]) -> Found | None:
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            if one != other:
                found = self.values(f"{path}[{index}]", one, other)
                if found is not None:
                    return found
        if len(recorded) != len(replayed):
            return Found(f"{path} (length)", str(len(recorded)), str(len(replayed)))
        return None

    def _same(self, path: str, recorded: object, replayed: object) -> bool:
        if isinstance(recorded, float) and isinstance(replayed, (int, float)):
            bound = 0.0
            if path.startswith("logprobs["):
                bound = self._tolerance
            elif path.startswith(("metrics.", "differences[")):
                bound = METRIC_TOLERANCE * max(1.0, abs(recorded))
            is_nan = recorded != recorded and replayed != replayed
            return is_nan or abs(recorded - replayed) <= bound
        return bool(recorded == replayed)

    def _is_volatile(self, path: str) -> bool:
        plain = _without_indices(path)
        return plain in self._volatile or any(plain.startswith(prefix) for prefix in self._prefixes)


def _without_indices(path: str) -> str:
    if "[" not in path:
        return path
    return "".join(part.partition("]")[2] if index else part for index, part in enumerate(path.split("[")))


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return repr(value)
