"""Messages of every type as they come from the bus: decoded, encoded again, and what the state of workers makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fleetbus.core.episode.turn_contexts import describe_turns
from fleetbus_schemas import MESSAGES, Action, Heartbeat, MalformedMessage, encode
from fleetbus_schemas.message import MAX_REASON_CHARACTERS, decode_any
from fleetbus_workers.observe.run.worker_registry import WorkerRegistry
from tests.fuzz.mutation import write_msgpack
from tests.fuzz.targets import ROOT

TREE = (msgspec.msgpack.decode, write_msgpack)


def run(data: bytes) -> None:
    """Decode and encode; what was decoded has to mean the same again."""
    try:
        message = decode_any(MESSAGES, data, subject="fb.run.episode.e1")
    except MalformedMessage as refused:
        assert refused.reason and len(refused.reason) <= MAX_REASON_CHARACTERS and refused.reason.isprintable()
        return
    try:
        written = encode(message)
    except MalformedMessage:
        return
    assert encode(decode_any(MESSAGES, written)) == written
    msgspec.json.encode(message)
    _use(message)


def _use(message: Any) -> None:
    registry = WorkerRegistry()
    registry.record_life_event(message, 0.0, 1.0)
    if isinstance(message, Heartbeat):
        registry.record_heartbeat(message, 1.0)
        registry.record_heartbeat(message, 2.0)
    msgspec.json.encode(registry.rows(3.0))
    if isinstance(message, Action):
        list(describe_turns([message, message]))


def list_seeds() -> Iterator[bytes]:
    """One of every type, with every field."""
    for file in sorted((ROOT / "tests/contract/golden").glob("*.bin")):
        yield file.read_bytes()
