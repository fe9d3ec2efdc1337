"""Where the time of one episode went: spans between the entries of the log, in seconds since its request. Pure.

The log's times are when the server stored an entry, so the spans leave no gaps and need no clock but its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import Action, AttemptReleased, AttemptStarted, EpisodeFinished, EpisodeRequested, Observation

Kind = Literal["waiting", "open", "queue", "generate", "travel", "environment", "verify", "lost"]
"""``waiting`` for a worker, ``open`` the environment, ``queue`` at the engine, ``generate``, ``travel`` to and from it,
``environment`` (tools and steps), ``verify`` and close, ``lost`` with a worker that went away."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """``[start, end)`` in seconds since the request."""

    kind: Kind
    start: float
    end: float
    attempt: int = 0
    turn: int = -1
    worker: str = ""


class _Builder:
    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns
        self.at = 0.0
        self.spans: list[Span] = []

    def to(self, kind: Kind, time_ns: int, **about: int | str) -> None:
        """A span from where the last one ended."""
        self.until(kind, (time_ns - self._zero_ns) / 1e9, **about)

    def until(self, kind: Kind, end: float, **about: int | str) -> None:
        if end > self.at:
            self.spans.append(msgspec.convert({"kind": kind, "start": self.at, "end": end, **about}, Span))
            self.at = end


def timeline(entries: Iterable[StreamEntry]) -> list[Span]:
    """The spans of one episode from its entries in log order; empty without its request."""
    builder: _Builder | None = None
    attempt, worker, turn, doing = 0, "", -1, ""
    for entry in entries:
        kind = entry.subject.split(".", 3)[2]
        if builder is None:
            if kind == "task" and decode_entries(EpisodeRequested, [entry]):
                builder = _Builder(entry.time_ns)
            continue
        if kind == "obs":
            for _, observation in decode_entries(Observation, [entry]):
                if (observation.attempt, observation.turn) == (attempt, turn) or observation.attempt < attempt:
                    continue  # sent again to another engine: it still waits for the same action
                builder.to("open" if doing == "open" else "environment", entry.time_ns, attempt=attempt, worker=worker)
                turn, doing = observation.turn, "action"
        elif kind == "act":
            for _, action in decode_entries(Action, [entry]):
                if action.attempt == attempt and action.turn == turn and doing == "action":
                    _add_inference_spans(builder, entry, action)
                    doing = "environment"
        elif kind == "episode":
            entry_message = decode_episode_entry(entry)
            about: dict[str, int | str] = {"attempt": attempt, "worker": worker}
            match entry_message:
                case AttemptStarted():
                    builder.to("lost" if attempt else "waiting", entry.time_ns, **about)
                    attempt, worker, turn, doing = entry_message.attempt, entry_message.worker, -1, "open"
                case AttemptReleased():
                    builder.to("environment", entry.time_ns, **about)
                case EpisodeFinished():
                    _add_final_spans(builder, entry, entry_message, about)
    return builder.spans if builder else []


def _add_inference_spans(builder: _Builder, entry: StreamEntry, action: Action) -> None:
    """The engine says how long the observation waited and how long it generated; the rest was under way."""
    about: dict[str, int | str] = {"attempt": action.attempt, "turn": action.turn, "worker": action.worker}
    ends = builder.at + max(action.seconds_queued, 0.0)
    builder.until("queue", ends, **about)
    builder.until("generate", ends + max(action.seconds_generating, 0.0), **about)
    builder.to("travel", entry.time_ns, **about)


def _add_final_spans(builder: _Builder, entry: StreamEntry, result: EpisodeFinished, about: dict[str, int | str]) -> None:
    """Verify and close come last; what is before them was the environment's."""
    last = sum(result.timings.get(stage, 0.0) for stage in ("verify", "close"))
    end = (entry.time_ns - builder._zero_ns) / 1e9
    builder.until("environment", max(builder.at, end - last), **about)
    builder.to("verify", entry.time_ns, **about)
