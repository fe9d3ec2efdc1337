"""Several servers as one: numbers added up, streams and consumers as their leader has them, and a silent one hides no other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.observe.run import nats_http
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


def test_one_server_under_two_addresses_counts_once() -> None:
    twice = build_server("a", id="NA", storage_problem="no space left on device")
    seen = combine([twice, build_server("b", id="NB", leads=True), twice])
    assert (seen.connections, seen.name, len(seen.clients)) == (6, "a,b", 2)
    assert not seen.storage_problem, "one of two stores nothing"


def answer_as(*parts: bytes, pause: float = 0.0) -> tuple[str, threading.Thread]:
    """The address of a server that says this to who connects, once, whatever is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def say() -> None:
        with listener:
            listener.settimeout(10)
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)

    thread = threading.Thread(target=say)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ((b'INFO {"server_id":"N"} \r\n',), "the endpoint is not a nats-server"),  # the port of its clients
        ((b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000,), "the endpoint is not a nats-server"),
        ((b"HTTP/1.1 200 OK\r\n\r\n", *(b" " for _ in range(30))), "timed out"),
    ],
)
def test_what_speaks_otherwise_or_never_ends_is_unknown_and_no_error(
    said: tuple[bytes, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_http, "ANSWER_SECONDS", 0.3)
    url, thread = answer_as(*said, pause=0.1 if len(said) > 1 else 0.0)
    begun = time.monotonic()
    assert read_nats_servers(url, "r").problem == f"no server monitoring at {url}: {problem}"
    assert time.monotonic() - begun < 2
    thread.join()


def test_numbers_that_are_none_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_http, "_fetch", lambda url, endpoint: {"connections": [], "server_name": "a"})
    problem = read_nats_servers("http://h:1", "r").problem
    assert problem == "http://h:1 does not answer as nats-server does (ValidationError)"
