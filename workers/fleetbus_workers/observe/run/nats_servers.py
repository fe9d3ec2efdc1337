"""Monitoring data of all servers of a cluster, as one: each is asked at the same time, and one that is down hides no other.

Above it are the views; below it `nats_http`, which asks one server. Numbers of a server are added up; a stream and a consumer
stand on several, and count as their leader has them, because followers of a consumer do not know what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleetbus.errors import UserError
from fleetbus_workers.observe.run.nats_http import NatsServer, is_led_by, parse_monitoring_address, read_nats_server

MAX_SERVERS = 16
"""Asked at a time, each in a thread; more are no cluster."""

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def parse_monitoring_addresses(urls: str) -> str:
    """``urls``, separated by commas, if each can be an address of monitoring; without repetitions. Raises `UserError`."""
    found = dict.fromkeys(parse_monitoring_address(url.strip()) for url in urls.split(",") if url.strip())
    if len(found) > MAX_SERVERS:
        raise UserError(f"--nats-http: {len(found)} addresses of one cluster; give {MAX_SERVERS} at most")
    return ",".join(found)


def read_nats_servers(urls: str | None, run: str, *, consumers: bool = False) -> NatsServer:
    """As `read_nats_server`, of all addresses in ``urls``; blocking, no longer than for the slowest of them.

    ``problem`` is set if none answers; ``problems`` are of single servers while others serve."""
    addresses = urls.split(",") if urls else []
    ask = partial(read_nats_server, run=run, consumers=consumers)
    if len(addresses) < 2:
        return ask(urls)
    with ThreadPoolExecutor(len(addresses), thread_name_prefix="nats monitoring") as threads:
        return combine(list(threads.map(ask, addresses)))


def combine(servers: Sequence[NatsServer]) -> NatsServer:
    """The servers as one; one that answers under two addresses counts once. A log with copies is stored as long as most of its
    servers store: until then a full disk is a problem of its server alone."""
    answered = list({each.id or number: each for number, each in enumerate(servers) if not each.problem}.values())
    silent = [each.problem for each in servers if each.problem]
    if not answered:
        return NatsServer(problem="; ".join(silent))
    full = [each for each in answered if each.storage_problem]
    is_stopped = 2 * len(full) > len(answered) + len(silent)
    failing = [f"{each.name} stores nothing since a write failed ({each.storage_problem})" for each in full]
    return NatsServer(
        name=",".join(each.name for each in answered),
        version=", ".join(sorted({each.version for each in answered})),
        uptime=max(answered, key=lambda each: each.started).uptime,
        connections=_add(each.connections for each in answered),
        slow_consumers=_add(each.slow_consumers for each in answered),
        memory_bytes=_add(each.memory_bytes for each in answered),
        cpu_percent=_add(each.cpu_percent for each in answered),
        clients=tuple(sorted((one for each in answered for one in each.clients), key=lambda one: -one.pending_bytes)),
        cut=tuple(sorted((one for each in answered for one in each.cut), key=lambda one: one.at)),
        streams=_take_leaders([one for each in answered for one in each.streams], lambda one: one.name, lambda one: one.leads),
        consumers=_take_leaders(
            [(each.name, one) for each in answered for one in each.consumers],
            lambda found: str(found[1].get("name")),
            lambda found: is_led_by(found[1], found[0]),
            lambda found: found[1],
        ),
        storage_problem="; ".join(dict.fromkeys(each.storage_problem for each in full)) if is_stopped else "",
        problems=(*silent, *(() if is_stopped else failing)),
    )


def _take_leaders(
    found: Iterable[T], name: Callable[[T], Hashable], leads: Callable[[T], bool], take: Callable[[T], Any] = lambda one: one
) -> tuple[Any, ...]:
    """One of each name: its leader's, or any while that one is silent."""
    chosen: dict[Hashable, T] = {}
    for one in found:
        if name(one) not in chosen or leads(one):
            chosen[name(one)] = one
    return tuple(take(one) for one in chosen.values())


def _add(numbers: Iterable[Number | None]) -> Number | None:
    known = [number for number in numbers if number is not None]
    return sum(known[1:], start=known[0]) if known else None
