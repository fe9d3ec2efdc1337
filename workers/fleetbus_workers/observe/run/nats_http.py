"""Monitoring data of a NATS server over HTTP: ``/varz``, ``/connz`` and ``/jsz``, asked when their address is known.

The endpoints are off unless the server was started with them (``-m 8222``); a server of `fleetbus up` always has them, on
loopback. Nothing here is ever an error: what the server does not report is unknown, and `NatsServer.problem` says in one line
why. Fields as of nats-server 2.15 (docs.nats.io/running-a-nats-service/nats_admin/monitoring).
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import lane_stream, log_stream
from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError

ANSWER_SECONDS = 2.0
MAX_ANSWER_BYTES = 32 << 20
CLIENTS = 1024
"""Connections are asked for up to this many, those with most unread bytes first."""

HOW = "no server monitoring: nats-server -m 8222, then --nats-http http://HOST:8222"
"""How to turn it on, where no address is known."""

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is on this machine or in this cluster, where no proxy leads."""

WRITE_ERROR = " write error: "
"""In ``/healthz`` of a server that could not write a stream. As of nats-server 2.15."""

SLOW = "Slow Consumer"
"""How the reason begins for which the server cuts a client off that does not read what it asked for."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A connection. ``worker`` is the name of a worker or command of the run, else the name that the client gave itself.
    ``pending_bytes`` are written for it and not taken by it yet."""

    worker: str
    role: str = ""
    pending_bytes: int = 0
    subscriptions: int = 0
    received: int = 0
    sent: int = 0
    idle: str = ""


class SlowClientDisconnect(msgspec.Struct, frozen=True, kw_only=True):
    """A client that the server cut off for being slow; ``at`` is RFC 3339."""

    worker: str
    reason: str
    at: str


class StreamBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A stream of the run: its log, its lanes, its object bucket."""

    name: str
    entries: int
    bytes: int
    leads: bool = True
    """The server that says so leads it, or has the only copy."""


class NatsServer(msgspec.Struct, frozen=True, kw_only=True):
    """None is unknown. ``clients`` are those of the run, and others that have unread bytes, those with most first;
    ``consumers`` as JetStream lists them."""

    name: str = ""
    id: str = ""
    """Of the process: no other server has it, under whatever address."""
    version: str = ""
    started: str = ""
    uptime: str = ""
    connections: int | None = None
    slow_consumers: int | None = None
    memory_bytes: int | None = None
    cpu_percent: float | None = None
    clients: tuple[Client, ...] = ()
    cut: tuple[SlowClientDisconnect, ...] = ()
    streams: tuple[StreamBytes, ...] = ()
    consumers: tuple[dict[str, Any], ...] = ()
    storage_problem: str = ""
    """Why the server writes nothing any more, in its own words; empty if it does."""
    problem: str = ""
    problems: tuple[str, ...] = ()
    """Of single servers of a cluster, while the others serve (`fleetbus_workers.observe.run.nats_servers`)."""


def parse_monitoring_address(url: str) -> str:
    """``url`` if it can be an address of monitoring; raises `UserError`."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if url and not is_address:
        raise UserError(f"--nats-http {strip_credentials(url)} is not an HTTP address such as http://127.0.0.1:8222")
    return url.rstrip("/")


def read_nats_server(url: str | None, run: str, *, consumers: bool = False) -> NatsServer:
    """All of it in five questions; blocking, for 2 s each at most. With ``consumers`` those of the log too.

    ``url`` is empty if there is a server whose address is not known, and None if there is nothing to ask or to say.
    """
    if url is None:
        return NatsServer()
    if not url:
        return NatsServer(problem=HOW)
    try:
        about = _fetch(url, "varz")
        clients = _fetch(url, f"connz?state=open&sort=pending&limit={CLIENTS}").get("connections") or []
        closed = _fetch(url, f"connz?state=closed&limit={CLIENTS}").get("connections") or []
        details = _fetch(url, f"jsz?streams=true&consumers={str(consumers).lower()}").get("account_details") or []
        found = NatsServer(
            name=str(about.get("server_name", "")),
            id=str(about.get("server_id", "")),
            version=str(about.get("version", "")),
            started=str(about.get("start", "")),
            uptime=str(about.get("uptime", "")),
            connections=about.get("connections"),
            slow_consumers=about.get("slow_consumers"),
            memory_bytes=about.get("mem"),
            cpu_percent=about.get("cpu"),
            clients=tuple(_parse_clients(clients, run)),
            cut=tuple(_parse_disconnects(closed, run)),
            streams=tuple(_parse_streams(details, run, str(about.get("server_name", "")))),
            consumers=tuple(_parse_consumers(details, run)),
            storage_problem=_fetch_storage_problem(url),
        )
        return msgspec.convert(msgspec.to_builtins(found), NatsServer)  # a number is one, whatever answered
    except _EndpointUnavailable as silent:
        return NatsServer(problem=f"no server monitoring at {strip_credentials(url)}: {silent}")
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
        return NatsServer(problem=f"{strip_credentials(url)} does not answer as nats-server does ({type(error).__name__})")


class _EndpointUnavailable(Exception):
    """The message is the reason why there is no answer."""


def _fetch(url: str, endpoint: str) -> dict[str, Any]:
    try:
        with _OPENER.open(f"{url}/{endpoint}", timeout=ANSWER_SECONDS) as answer:
            content = json.loads(_read(answer))
    except urllib.error.HTTPError as error:
        raise _EndpointUnavailable(f"status {error.code}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise _EndpointUnavailable(getattr(reason, "strerror", None) or str(reason) or "no answer") from error
    except (ValueError, RecursionError, http.client.HTTPException) as error:  # as of a port that speaks no HTTP
        raise _EndpointUnavailable("the endpoint is not a nats-server") from error
    if not isinstance(content, dict):
        raise _EndpointUnavailable("the endpoint is not a nats-server")
    return content


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The body, as far as it may be long; what comes byte by byte takes no longer than what does not come."""
    end, parts, left = time.monotonic() + ANSWER_SECONDS, [], MAX_ANSWER_BYTES
    while left and (part := answer.read1(left)):
        parts.append(part)
        left -= len(part)
        if time.monotonic() > end:
            raise TimeoutError("timed out")
    return b"".join(parts)


def _fetch_storage_problem(url: str) -> str:
    """The end of ``/healthz``'s error about a stream that could not be written: the server refuses all that comes later, until
    it is started again. It is unavailable for other reasons, too, which pass."""
    try:
        with _OPENER.open(f"{url}/healthz", timeout=ANSWER_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        try:
            said = str(json.loads(error.read(MAX_ANSWER_BYTES)).get("error", ""))
        except (OSError, ValueError, AttributeError, RecursionError, http.client.HTTPException):
            return ""
        return said.rpartition(": ")[2] if WRITE_ERROR in said else ""
    except (OSError, http.client.HTTPException):
        return ""


def _parse_clients(connections: Iterable[dict[str, Any]], run: str) -> Iterator[Client]:
    for each in connections:
        role, worker = _parse_client_name(each, run)
        if role or each.get("pending_bytes"):
            yield Client(
                worker=worker,
                role=role,
                pending_bytes=each.get("pending_bytes", 0),
                subscriptions=each.get("subscriptions", 0),
                received=each.get("out_msgs", 0),
                sent=each.get("in_msgs", 0),
                idle=each.get("idle", ""),
            )


def _parse_disconnects(closed: Iterable[dict[str, Any]], run: str) -> Iterator[SlowClientDisconnect]:
    for each in closed:
        if str(each.get("reason", "")).startswith(SLOW):
            yield SlowClientDisconnect(
                worker=_parse_client_name(each, run)[1], reason=each["reason"], at=str(each.get("stop", ""))
            )


def _parse_client_name(each: dict[str, Any], run: str) -> tuple[str, str]:
    """Role and worker out of ``fleetbus <run> <role> <worker>``, as `fleetbus.bus.nats.connect` names its connections; no role
    for those that are not of this run."""
    name = str(each.get("name", ""))
    words = name.split(" ")
    if len(words) == 4 and words[:2] == ["fleetbus", run]:
        return words[2], words[3]
    return "", name or f"connection {each.get('cid', '?')}"


def _parse_streams(details: Iterable[dict[str, Any]], run: str, server: str) -> Iterator[StreamBytes]:
    own = (log_stream(run), lane_stream(run), f"OBJ_{weights_bucket(run)}", f"OBJ_{images_bucket(run)}")
    for stream in _iterate_streams(details):
        if stream["name"] in own:
            state = stream["state"]
            yield StreamBytes(
                name=stream["name"], entries=state["messages"], bytes=state["bytes"], leads=is_led_by(stream, server)
            )


def _parse_consumers(details: Iterable[dict[str, Any]], run: str) -> Iterator[dict[str, Any]]:
    for stream in _iterate_streams(details):
        if stream["name"] == log_stream(run):
            yield from stream.get("consumer_detail") or ()


def is_led_by(stored: dict[str, Any], server: str) -> bool:
    """True if this server leads the stream or consumer that it reports, or if that has no copies."""
    return bool((stored.get("cluster") or {}).get("leader", server) == server)


def _iterate_streams(details: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for account in details:
        yield from account.get("stream_detail") or ()
