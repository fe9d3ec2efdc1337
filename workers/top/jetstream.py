"""What the server knows of a run's log and consumers, asked over the bus: JetStream's API is a set of subjects.

Only read; a server that does not answer, or is none (the in-memory bus), leaves the numbers unknown. The NATS monitoring
endpoints ``/varz`` and ``/connz`` tell of slow consumers and connections; they are asked when their address is given.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anyio.to_thread
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import log_stream
from fleetbus.errors import BusClosed, BusError

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
    """None is unknown. ``oldest`` is the time of the first entry (RFC 3339)."""

    entries: int | None = None
    bytes: int | None = None
    oldest: str = ""
    consumers: tuple[ConsumerPending, ...] = ()
    connections: int | None = None
    slow_consumers: int | None = None
    memory_bytes: int | None = None
    cpu_percent: float | None = None

    @property
    def pending(self) -> int:
        return sum(each.pending for each in self.consumers)

    @property
    def redelivered(self) -> int:
        return sum(each.redelivered for each in self.consumers)


async def look_at_server(bus: Bus, run: str, monitor_url: str = "") -> ServerView:
    """The server's view of the run, as far as it can be had."""
    stream = log_stream(run)
    info = await _ask(bus, f"$JS.API.STREAM.INFO.{stream}", {})
    state = info.get("state", {})
    varz = await anyio.to_thread.run_sync(read_monitoring, monitor_url, "varz") if monitor_url else {}
    return ServerView(
        entries=state.get("messages"),
        bytes=state.get("bytes"),
        oldest=state.get("first_ts", ""),
        consumers=await _consumers(bus, stream) if state else (),
        connections=varz.get("connections"),
        slow_consumers=varz.get("slow_consumers"),
        memory_bytes=varz.get("mem"),
        cpu_percent=varz.get("cpu"),
    )


def read_monitoring(url: str, endpoint: str) -> dict[str, Any]:
    """One of the monitoring endpoints as JSON, {} when it does not answer; blocking."""
    if not url.startswith(("http://", "https://")):
        return {}
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/{endpoint}", timeout=ANSWER_SECONDS) as answer:
            content = json.load(answer)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


async def _consumers(bus: Bus, stream: str) -> tuple[ConsumerPending, ...]:
    found: dict[str, list[dict[str, Any]]] = {}
    seen = 0
    for _ in range(PAGES):
        answer = await _ask(bus, f"$JS.API.CONSUMER.LIST.{stream}", {"offset": seen})
        page = answer.get("consumers") or []
        for each in page:
            kind = each["name"].partition("_")[0]
            if kind in ("task", "obs", "act"):
                found.setdefault(kind, []).append(each)
        seen += len(page)
        if not page or seen >= answer.get("total", 0):
            break
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


async def _ask(bus: Bus, subject: str, question: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = json.loads(await bus.request(subject, json.dumps(question).encode(), timeout=ANSWER_SECONDS))
    except BusClosed:
        raise
    except (BusError, ValueError):
        return {}
    return answer if isinstance(answer, dict) and "error" not in answer else {}
