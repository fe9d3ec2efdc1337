"""The names that the bus uses of nats-py beyond its public calls: one file, few names, each looked for before it is used."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.transport import Transport

from fleetbus.bus.nats import connect, connection, nats_py, socket_wire
from fleetbus.bus.nats.client_wire import ClientWire
from fleetbus.bus.nats.server import run_server
from tests.support.backends import asyncio_alone

FOLDER = Path(nats_py.__file__).parent


anyio_backend = asyncio_alone


def test_the_installed_nats_py_has_what_the_bus_uses() -> None:
    assert nats_py.find_unsupported("nats://a:4222, tls://b, 127.0.0.1:4222") == ""


def test_one_file_uses_private_names_and_lists_them() -> None:
    used: dict[str, set[str]] = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not own:
                    used.setdefault(path.name, set()).add(node.attr)
    assert used == {"nats_py.py": set(nats_py.PRIVATE_NAMES)}


def test_no_class_of_nats_py_is_extended_but_its_transport() -> None:
    """What it overrides by chance would be private, too."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                assert bases.isdisjoint({"Client", "Parser", "Subscription", "TcpTransport"}), path.name


def test_a_name_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_py, "PRIVATE_NAMES", ("_transport", "_of_another_release"))
    assert "has no _of_another_release to set" in nats_py.find_unsupported("nats://a")


def test_a_name_that_means_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Client.__init__

    def make(self: Any) -> None:
        made(self)
        self._transport = object()

    monkeypatch.setattr(Client, "__init__", make)
    assert "has no _transport to set" in nats_py.find_unsupported("nats://a")


def test_a_transport_that_is_called_in_another_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(self: Any, size: int, deadline: float) -> bytes:
        return b""

    monkeypatch.setattr(Transport, "read", read)
    assert "calls its transport's read in another way" in nats_py.find_unsupported("nats://a")
    monkeypatch.setattr(Transport, "__abstractmethods__", Transport.__abstractmethods__ | {"splice"})
    monkeypatch.setattr(Transport, "splice", read, raising=False)
    monkeypatch.undo()
    assert not nats_py.find_unsupported("nats://a")


def test_a_web_socket_goes_by_nats_py() -> None:
    assert nats_py.find_unsupported("wss://a:443") == "the URL is not that of a plain socket"


@pytest.mark.parametrize("change", ["a name is missing", "the transport is ignored"])
async def test_a_bus_without_its_private_names_works_and_says_once_that_it_is_slower(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats_py, "_said", set())
    if change == "a name is missing":
        monkeypatch.setattr(nats_py, "PRIVATE_NAMES", ("_of_another_release",))
    else:
        monkeypatch.setattr(socket_wire, "attach_transport", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        async with run_server(tmp_path) as server:
            for _ in range(2):
                async with connect(server.url, run="r") as bus:
                    inner: connection.Connection = bus._connection  # type: ignore[attr-defined]
                    await inner.round_trip(5)
                    assert isinstance(inner.wire, ClientWire)
    assert len([record for record in caplog.records if "public calls" in record.getMessage()]) == 1
