"""The metrics' port: a page whose name leads to it reads nothing, and idle connections hold no thread each."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")

from fleetbus_workers.observe.metrics import scrapes
from fleetbus_workers.observe.metrics.exposition import Exposition, serve_metrics


@pytest.fixture
def port() -> Iterator[int]:
    with serve_metrics(Exposition("r"), "127.0.0.1", 0) as port:
        yield port


def ask(port: int, host: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        found = b""
        while read := connection.recv(65_536):
            found += read
        return found


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9100", "localhost.evil.example", "", "127.0.0.1.evil.example"])
def test_a_name_of_a_strangers_is_answered_nothing(host: str, port: int) -> None:
    answer = ask(port, host)
    assert b" 400 " in answer.splitlines()[0] and b"--allow-host" in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9100", "[::1]:9100"])
def test_this_machines_names_are_answered(host: str, port: int) -> None:
    assert b" 200 " in ask(port, host).splitlines()[0]


@pytest.mark.integration
def test_idle_connections_hold_so_many_threads_and_these_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes.Scrape, "timeout", 2.0)
    before = threading.active_count()
    with serve_metrics(Exposition("r"), "127.0.0.1", 0) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(3 * scrapes.MAX_CONNECTIONS)]
        try:
            most, until = 0, time.monotonic() + 1.0
            while time.monotonic() < until:
                most = max(most, threading.active_count())
            assert most <= before + 1 + scrapes.MAX_CONNECTIONS
            assert all(connection.recv(1) == b"" for connection in idle), "beyond the limit, or idle for too long"
            assert b" 200 " in ask(port, "localhost")
        finally:
            for connection in idle:
                connection.close()


def test_a_name_that_the_operator_allows_is_answered() -> None:
    with serve_metrics(Exposition("r"), "127.0.0.1", 0, ("metrics.corp.example",)) as port:
        assert b" 200 " in ask(port, "metrics.corp.example").splitlines()[0]
