"""Several servers as one: numbers added up, streams and consumers as their leader has them, and a silent one hides no other."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.observe.run.nats_http import Client, NatsServer, StreamBytes
from fleetbus_workers.observe.run.nats_servers import combine, parse_monitoring_addresses, read_nats_servers

SILENT = NatsServer(problem="no server monitoring at http://c:8222: timed out")


def build_server(name: str, *, leads: bool = False, unread: int = 0, **fields: Any) -> NatsServer:
    consumer = {"name": "task_default", "num_pending": 5 if leads else 0, "cluster": {"leader": "b"}}
    return NatsServer(
        name=name,
        version="2.15.0",
        connections=3,
        slow_consumers=0,
        memory_bytes=100,
        clients=(Client(worker=f"at {name}", pending_bytes=unread),),
        streams=(StreamBytes(name="fb_r", entries=9 if leads else 8, bytes=90, leads=leads),),
        consumers=(consumer,),
        **fields,
    )


def test_numbers_are_added_up_and_what_has_copies_counts_as_its_leader_has_it() -> None:
    a, b = build_server("a", started="2026-01-02", uptime="1h"), build_server("b", leads=True, unread=7, started="2026-01-01")
    seen = combine([a, b, build_server("c", started="2026-01-01")])
    assert (seen.connections, seen.memory_bytes, seen.slow_consumers, seen.cpu_percent) == (9, 300, 0, None)
    assert [client.worker for client in seen.clients] == ["at b", "at a", "at c"], "those with most unread bytes first"
    assert [stream.entries for stream in seen.streams] == [9] and [each["num_pending"] for each in seen.consumers] == [5]
    assert (seen.version, seen.uptime) == ("2.15.0", "1h") and not seen.problem and not seen.problems


def test_a_silent_server_is_named_and_the_others_are_read() -> None:
    seen = combine([SILENT, build_server("a"), build_server("b", leads=True)])
    assert seen.connections == 6 and not seen.problem and seen.problems == (SILENT.problem,)
    assert combine([SILENT, SILENT]).problem == f"{SILENT.problem}; {SILENT.problem}"


@pytest.mark.parametrize(("full", "is_stopped"), [(1, False), (2, True), (3, True)])
def test_a_full_disk_stops_the_log_once_most_servers_store_nothing(full: int, is_stopped: bool) -> None:
    why = "no space left on device"
    servers = [build_server(name, storage_problem=why if index < full else "") for index, name in enumerate("abc")]
    seen = combine(servers)
    assert seen.storage_problem == (why if is_stopped else "")
    assert seen.problems == (() if is_stopped else ("a stores nothing since a write failed (no space left on device)",))


def test_each_address_is_checked_and_named_once() -> None:
    assert parse_monitoring_addresses("http://a:8222/, http://b:8222,http://a:8222") == "http://a:8222,http://b:8222"
    assert parse_monitoring_addresses("") == ""
    with pytest.raises(UserError, match="b:8222 is not an HTTP address"):
        parse_monitoring_addresses("http://a:8222,b:8222")


def test_of_several_addresses_where_nobody_answers_each_is_named() -> None:
    seen = read_nats_servers("http://127.0.0.1:1,http://localhost:1", "r")
    assert "127.0.0.1:1: Connection refused" in seen.problem and "localhost:1" in seen.problem and seen.connections is None


def test_more_servers_than_are_asked_are_refused() -> None:
    with pytest.raises(UserError, match="17 addresses of one cluster; give 16 at most"):
        parse_monitoring_addresses(",".join(f"http://10.0.0.{number}:8222" for number in range(17)))
