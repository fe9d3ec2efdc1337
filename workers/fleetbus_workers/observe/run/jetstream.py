"""Asks the server over the bus about a run's log and consumers: JetStream's API is a set of subjects.

Only read; a server that does not answer, or is none (the in-memory bus), leaves the numbers unknown. Connections and slow
consumers come over HTTP alone (`fleetbus_workers.observe.run.nats_http`); consumers too, where JetStream's API may not be
asked: with accounts their names are a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec

from fleetbus.bus.base import CallBus
from fleetbus.bus.streams import log_stream
from fleetbus.errors import BusClosed, BusError, NotPermitted
from fleetbus_workers.observe.run.nats_http import Client, NatsServer, SlowClientDisconnect, StreamBytes
from fleetbus_workers.observe.run.nats_servers import read_nats_servers

ANSWER_SECONDS = 2.0
PAGES = 8
"""Consumers are listed 256 at a time."""


class ConsumerPending(msgspec.Struct, frozen=True, kw_only=True):
    """The durable consumers of one kind (``task``, ``obs``, ``act``) taken together."""

    kind: str
    consumers: int = 0
    pending: int = 0
    unacked: int = 0
    redelivered: int = 0


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """None is unknown. ``oldest`` is the time of the first entry (RFC 3339); ``hint`` says why connections are unknown,
    ``problems`` what single servers of a cluster lack while the others serve."""

    entries: int | None = None
    bytes: int | None = None
    oldest: str = ""
    consumers: tuple[ConsumerPending, ...] = ()
    connections: int | None = None
    slow_consumers: int | None = None
    memory_bytes: int | None = None
    cpu_percent: float | None = None
    version: str = ""
    uptime: str = ""
    clients: tuple[Client, ...] = ()
    cut: tuple[SlowClientDisconnect, ...] = ()
    streams: tuple[StreamBytes, ...] = ()
    storage_problem: str = ""
    hint: str = ""
    problems: tuple[str, ...] = ()

    @property
    def pending(self) -> int:
        return sum(each.pending for each in self.consumers)

    @property
    def redelivered(self) -> int:
        return sum(each.redelivered for each in self.consumers)


async def fetch_server_view(bus: CallBus, run: str, nats_http: str | None = None) -> ServerView:
    """The server's view of the run, as far as it can be had; ``nats_http`` as `read_nats_servers` takes it."""
    stream = log_stream(run)
    info = await _request_api(bus, f"$JS.API.STREAM.INFO.{stream}", {})
    state = info.get("state", {})
    consumers = await _fetch_consumers(bus, stream) if state else ()
    answered = NatsServer()
    if nats_http is not None:
        answered = await anyio.to_thread.run_sync(partial(read_nats_servers, nats_http, run, consumers=not consumers))
    return ServerView(
        entries=state.get("messages"),
        bytes=state.get("bytes"),
        oldest=state.get("first_ts", ""),
        consumers=consumers or _group_by_kind(answered.consumers),
        connections=answered.connections,
        slow_consumers=answered.slow_consumers,
        memory_bytes=answered.memory_bytes,
        cpu_percent=answered.cpu_percent,
        version=answered.version,
        uptime=answered.uptime,
        clients=answered.clients,
        cut=answered.cut,
        streams=answered.streams,
        storage_problem=answered.storage_problem,
        hint=answered.problem,
        problems=answered.problems,
    )


async def _fetch_consumers(bus: CallBus, stream: str) -> tuple[ConsumerPending, ...]:
    found: list[dict[str, Any]] = []
    for _ in range(PAGES):
        answer = await _request_api(bus, f"$JS.API.CONSUMER.LIST.{stream}", {"offset": len(found)})
        page = answer.get("consumers") or []
        found += page
        if not page or len(found) >= answer.get("total", 0):
            break
    return _group_by_kind(found)


def _group_by_kind(listed: Iterable[dict[str, Any]]) -> tuple[ConsumerPending, ...]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in listed:
        kind = each["name"].partition("_")[0]
        if kind in ("task", "obs", "act"):
            found.setdefault(kind, []).append(each)
    return tuple(
        ConsumerPending(
            kind=kind,
            consumers=len(each),
            pending=sum(one["num_pending"] for one in each),
            unacked=sum(one["num_ack_pending"] for one in each),
            redelivered=sum(one["num_redelivered"] for one in each),
        )
        for kind, each in sorted(found.items())
    )


async def _request_api(bus: CallBus, subject: str, question: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = json.loads(await bus.request(subject, json.dumps(question).encode(), timeout=ANSWER_SECONDS))
    except BusClosed:
        raise
    except (BusError, NotPermitted, ValueError):
        return {}
    return answer if isinstance(answer, dict) and "error" not in answer else {}
