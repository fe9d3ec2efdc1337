"""Entries of a log from messages, and what a view folds of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetbus.bus.base import StreamEntry
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import (
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    LineageStarted,
    Message,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.observe.run.state import RunState

SUBJECTS = Subjects("r")
SECOND = 1_000_000_000
NOW_NS = 1_000 * SECOND
LINEAGE = (SUBJECTS.train("default"), LineageStarted(lineage="l1", worker="learner"))


def claim(name: str) -> AttemptStarted:
    return AttemptStarted(episode_id=name, attempt=1, worker="w", nonce="n", lane="e0")


def finished(number: int, **fields: Any) -> tuple[str, EpisodeFinished]:
    name = f"e{number}"
    given: dict[str, Any] = {"outcome": "completed", "worker": "w", "reward": 1.0, "env": "game"} | fields
    return SUBJECTS.episode(name), EpisodeFinished(episode_id=name, group_id="g", attempt=1, **given)


def requested(number: int, name: str = "") -> tuple[str, EpisodeRequested]:
    request = EpisodeRequested(
        episode_id=name or f"e{number}", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default",
        deadline_ns=0,
    )  # fmt: skip
    return SUBJECTS.task("default", f"e{number}"), request


def build_entries(*messages: tuple[str, Message]) -> list[StreamEntry]:
    return [
        StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=sequence * SECOND)
        for sequence, (subject, message) in enumerate(messages, 1)
    ]


def fold(*messages: tuple[str, Message], beats: Sequence[Heartbeat] = ()) -> RunState:
    state = RunState(steps=50)
    for entry in build_entries(*messages):
        if (message := read_stored(entry)) is None:
            state.malformed += 1
        else:
            state.apply(entry, message, 0.0, entry.time_ns)
    for beat in beats:
        state.worker_registry.record_heartbeat(beat, 0.0)
    return state
