"""Ids of traces in log records, those that `fleetbus trace` gives: a record leads to its spans, and a span to its records.

Records and `structlog.contextvars` name an episode by id and deadline, or a session; the ids are derived only when a record is
written (docs/decisions/0233-records-lead-to-traces.md). The JSON log has them; lines for people do without.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from fleetbus.core.episode.trace_ids import ROOT, build_call_path, build_turn_path, compute_session_trace_id, span_id, trace_id


class _NamesEpisode(Protocol):
    @property
    def episode_id(self) -> str: ...

    @property
    def deadline_ns(self) -> int: ...


def name_episode(message: _NamesEpisode) -> dict[str, str | int]:
    """The keywords of a record about the episode of a request or an observation; its deadline is a part of its trace's id."""
    return {"episode": message.episode_id, "deadline_ns": message.deadline_ns}


def add_trace_ids(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: ``trace_id`` and ``span_id`` as 32 and 16 hexadecimal digits, of the narrowest span that the
    record names. A record without a run, or about an episode whose deadline is not known there, gets none."""
    run, deadline_ns, call = event.get("run"), event.pop("deadline_ns", None), event.pop("call_key", None)
    if not run or "trace_id" in event:
        return event
    if "episode" in event and deadline_ns is not None:
        trace, path = trace_id(run, event["episode"], deadline_ns), _find_path(event)
    elif isinstance(event.get("session"), str):
        trace, path = compute_session_trace_id(run, event["session"]), build_call_path(call) if call else ROOT
    else:
        return event
    event["trace_id"], event["span_id"] = f"{trace:032x}", f"{span_id(trace, path):016x}"
    return event


def drop_trace_parts(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor for lines that people read: without what only ids are made of."""
    event.pop("deadline_ns", None)
    event.pop("call_key", None)
    return event


def _find_path(event: MutableMapping[str, Any]) -> str:
    attempt, turn = event.get("attempt"), event.get("turn")
    if attempt is None:
        return ROOT
    return f"attempt/{attempt}" if turn is None else build_turn_path(attempt, turn)
