"""Workers that come by WebSocket to servers with keys and TLS, as `fleetbus auth init --websocket` lets them."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.streams.tls
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.renewal import renew_certificates
from fleetbus.auth.rotation import revoke_key
from fleetbus.bus import nats
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import client_wire
from fleetbus.bus.objects import weights_bucket
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusClosed
from fleetbus_schemas import MAX_MESSAGE_BYTES, Subjects
from tests.support.ports import free_ports
from tests.support.servers import RunningServers, _reload, running_servers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

RUN = "outside"
S = Subjects(RUN)
BIG = 12
"""Entries of the size limit: more bytes together than a WebSocket's message has by default."""


class Place:
    """Servers, and the addresses of their WebSockets."""

    def __init__(self, servers: RunningServers, ports: list[int]) -> None:
        self.servers = servers
        self.ports = ports

    @property
    def auth(self) -> Path:
        assert self.servers.auth is not None
        return self.servers.auth.path

    def connect(self, role: str, url: str = "") -> AbstractAsyncContextManager[Bus]:
        url = url or f"wss://127.0.0.1:{self.ports[0]}"
        access = build_access(role, str(self.auth), RUN)
        return nats.connect(url, run=RUN, role=role, worker=f"{role}-1", **access)


@asynccontextmanager
async def serving(folder: Path, form: str = "keyed") -> AsyncIterator[Place]:
    count = 3 if form == "cluster" else 1
    ports, plan = free_ports(count), plan_run(RUN, lanes=2, max_bytes=1 << 28, replicas=count if count > 1 else 0)
    async with running_servers(folder, [plan], form=form, websockets=[f"127.0.0.1:{port}" for port in ports]) as servers:
        await servers.declare(plan)
        yield Place(servers, ports)


async def count_entries(bus: Bus, size: int) -> int:
    return sum([len(entry.payload) == size async for entry in bus.scan([S.train("default")])])


async def test_entries_of_the_size_limit_go_both_ways_many_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as place, place.connect("learner") as bus:
        async with anyio.create_task_group() as tasks:
            for number in range(BIG):
                tasks.start_soon(bus.publish, S.train("default"), bytes([number]) * MAX_MESSAGE_BYTES)
        assert await count_entries(bus, MAX_MESSAGE_BYTES) == BIG


async def test_weights_reach_an_inference_worker(tmp_path: Path) -> None:
    weights, fetched = tmp_path / "weights", tmp_path / "fetched"
    weights.write_bytes(os.urandom(24 << 20))
    async with serving(tmp_path) as place, place.connect("learner") as learner, place.connect("inference") as inference:
        for bus, call in ((learner, "put"), (inference, "get")):
            objects = bus.objects(weights_bucket(RUN))
            assert objects is not None
            await getattr(objects, call)("v1", weights if call == "put" else fetched)
    assert fetched.read_bytes() == weights.read_bytes()


@pytest.mark.parametrize("form", ["keyed", "cluster"])
async def test_a_worker_comes_back_when_its_server_does_and_stores_what_it_meant_to(form: str, tmp_path: Path) -> None:
    """Servers of a cluster tell of each other, by addresses that are no WebSockets to who comes by one."""
    async with serving(tmp_path, form) as place, place.connect("learner") as bus:
        await bus.publish(S.train("default"), b"1")
        for size in (2, 3):
            await place.servers.processes[0].kill()
            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(bus.publish, S.train("default"), b"x" * size)
                    await place.servers.processes[0].restart()
            assert await count_entries(bus, size) == 1


async def test_a_server_that_takes_connections_and_says_nothing_delays_a_worker_by_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_wire, "TRY_SECONDS", 1.0)
    tried = anyio.Event()

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        tried.set()
        async with stream:
            await anyio.sleep(60)

    silent = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with silent, serving(tmp_path) as place:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(silent.serve, say_nothing)
            port = silent.extra(anyio.abc.SocketAttribute.local_port)
            urls = f"wss://127.0.0.1:{place.ports[0]},wss://127.0.0.1:{port}"
            async with place.connect("learner", urls) as bus:
                with anyio.fail_after(20):
                    while not tried.is_set():
                        await bus._connection.wire.force_reconnect()  # type: ignore[attr-defined]
                        await bus.publish(S.train("default"), b"1")
            tasks.cancel_scope.cancel()


async def test_a_key_that_is_withdrawn_ends_its_worker_and_another_run_ends_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        with pytest.raises(BusClosed, match="refuses the credentials"):
            async with place.connect("learner") as bus:
                await anyio.to_thread.run_sync(place.servers.let_in, "another")
                await bus.publish(S.train("default"), b"1")
                assert place.servers.auth is not None
                revoke_key(place.servers.auth, RUN, "learner")
                os.kill(place.servers.processes[0].pid, signal.SIGHUP)
                await anyio.sleep(30)


async def test_a_renewed_certificate_is_shown_after_a_reload(tmp_path: Path) -> None:
    async def see(place: Place) -> bytes:
        trusting = ssl.create_default_context(cafile=place.auth / "ca.pem")
        async with await anyio.connect_tcp("127.0.0.1", place.ports[0], tls=True, ssl_context=trusting) as stream:
            seen = stream.extra(anyio.streams.tls.TLSAttribute.peer_certificate_binary)
        assert isinstance(seen, bytes)
        return seen

    async with serving(tmp_path) as place:
        before = await see(place)
        assert place.servers.auth is not None
        for _ in ("trust", "show"):
            renew_certificates(place.servers.auth, days=1)
        await anyio.to_thread.run_sync(_reload, place.servers.processes[0])
        assert await see(place) != before
        async with place.connect("learner") as bus:
            await bus.publish(S.train("default"), b"1")
