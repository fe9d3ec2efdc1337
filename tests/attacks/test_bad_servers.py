"""A bad environment server: endless and exploding answers end one episode; 32 others on the loop go on within a second."""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve as serve_sockets

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.openenv.client import open_session
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer
from fleetbus_workers.environment.adapters.remote_gym.client import ServerPool
from fleetbus_workers.environment.adapters.remote_gym.environment import RemoteGymEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.task_permissions import TaskPermissions
from tests.support.backends import asyncio_alone
from tests.support.processes import children, until

pytestmark = pytest.mark.integration

OTHERS = 32
P99_SECONDS = 1.0

anyio_backend = asyncio_alone


class Others:
    """Thirty-two episodes that take a step every few milliseconds, and how late each step was."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.playing = 0

    async def play(self) -> None:
        self.playing += 1
        while True:
            due = anyio.current_time() + 0.005
            await anyio.sleep_until(due)
            self.latencies.append(anyio.current_time() - due)

    def p99(self) -> float:
        return sorted(self.latencies)[int(len(self.latencies) * 0.99)]


@asynccontextmanager
async def beside_others() -> AsyncIterator[Others]:
    others = Others()
    with anyio.fail_after(50):
        async with anyio.create_task_group() as group:
            for _ in range(OTHERS):
                group.start_soon(others.play)
            await anyio.sleep(0.05)
            yield others
            assert others.playing == OTHERS
            print(f"p99 of {len(others.latencies)} steps of {OTHERS} others: {others.p99() * 1000:.1f} ms")
            assert others.p99() < P99_SECONDS and max(others.latencies) < 2 * P99_SECONDS
            group.cancel_scope.cancel()


HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def http_server(body: Callable[[], Any], *, kind: str = "application/json", more: str = "") -> AsyncIterator[str]:
    """Answers everything with chunks from ``body``, as long as they are taken."""

    async def answer(stream: Any) -> None:
        async with stream:
            try:
                await stream.receive()
                await stream.send(HEAD.format(kind=kind, more=more).encode())
                for chunk in body():
                    await stream.send(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                    await anyio.lowlevel.checkpoint()
                await stream.send(b"0\r\n\r\n")
            except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
                return

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


def endless_text() -> Any:
    yield b'{"obs": "'
    while True:
        yield b"x" * (1 << 20)


def endless_lists() -> Any:
    yield b'{"obs": ['
    while True:
        yield b"[]," * (1 << 18)


def large_lists() -> Any:
    yield b'{"obs": ['
    for _ in range(24):
        yield b"[]," * (1 << 18)
    yield b"[]]}"


ZIPPED = zlib.compress(bytes(64 << 20), 1)


def zipped() -> Any:
    yield ZIPPED


BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "endless text": (endless_text, "application/json", ""),
    "endless text, not called JSON": (endless_text, "text/plain", ""),
    "endless lists": (endless_lists, "application/json", ""),
    "19 MB of lists": (large_lists, "application/json", ""),
    "compressed": (zipped, "application/json", "Content-Encoding: deflate\r\n"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_remote_gym_ends_its_own_episode_alone(name: str) -> None:
    body, kind, more = BAD[name]
    async with http_server(body, kind=kind, more=more) as url, beside_others():
        pool = ServerPool()
        async with pool.run():
            environment = RemoteGymEnvironment(pool, [url], permissions=TaskPermissions())
            with pytest.raises(EnvironmentFailed):
                await environment.open(Task(key="t", config={"retries": 0}))


@pytest.mark.parametrize("name", BAD)
async def test_health_without_an_end_is_no_health(name: str) -> None:
    body, kind, more = BAD[name]
    async with http_server(body, kind=kind, more=more) as url, beside_others():
        pool = ServerPool()
        async with pool.run():
            assert not await pool.is_idempotent(url)


@pytest.mark.parametrize("name", BAD)
async def test_a_schema_without_an_end_is_refused(name: str) -> None:
    body, kind, more = BAD[name]
    async with http_server(body, kind=kind, more=more) as url, beside_others():
        with pytest.raises(EnvironmentFailed):
            await OpenEnvServer(url).fetch_action_schema()


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_mcp_server_ends_its_own_episode_alone(name: str) -> None:
    from fleetbus_workers.environment.adapters.mcp.client import ConnectionHost
    from fleetbus_workers.environment.adapters.mcp.http_connection import http_connection

    body, kind, more = BAD[name]
    host = ConnectionHost()
    async with http_server(body, kind=kind, more=more) as url, beside_others(), host.run():
        with pytest.raises(EnvironmentFailed):
            await http_connection(f"{url}/mcp", host, call_seconds=10).open()


LINES = {
    "a line without an end": "while True: sys.stdout.write('x' * 65536)",
    "a message without an end": "sys.stdout.write('{\"result\": \"')\nwhile True: sys.stdout.write('x' * 65536)",
    "many values": "print('[' + '[],' * 9_000_000 + '[]]', flush=True)\nwhile sys.stdin.read(1): pass",
    "silence": "while sys.stdin.read(1): pass",
}


@pytest.mark.parametrize("name", LINES)
async def test_a_bad_mcp_server_over_standard_output_ends_its_own_episode_alone(name: str) -> None:
    from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_command

    host = ConnectionHost()
    command = [sys.executable, "-c", f"import sys\n{LINES[name]}"]
    async with beside_others(), host.run():
        connection = ClientConnection(partial(open_command, command), host, call_seconds=10)
        with pytest.raises((EnvironmentFailed, TimeoutError)):
            with anyio.fail_after(3 if name in ("many values", "silence") else 30):
                await connection.open()
        await connection.close()
    await until(lambda: not children())


def frame(observation: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": observation}})


OBSERVATIONS: dict[str, Callable[[], str]] = {
    "6 MB of lists": lambda: frame({"x": "LISTS"}).replace('"LISTS"', "[" + "[]," * 2_000_000 + "[]]"),
    "30 MB of lists": lambda: frame({"x": "LISTS"}).replace('"LISTS"', "[" + "[]," * 10_000_000 + "[]]"),
    "95 MB of lists": lambda: frame({"x": "LISTS"}).replace('"LISTS"', "[" + "[]," * 31_000_000 + "[]]"),
    "nested": lambda: frame({"x": "LISTS"}).replace('"LISTS"', "[" * 3_000_000 + "]" * 3_000_000),
    "objects": lambda: frame({"x": "LISTS"}).replace('"LISTS"', "[" + '{"a":{}},' * 600_000 + "{}]"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
async def test_an_observation_of_millions_of_values_ends_its_own_episode_alone(name: str) -> None:
    large = OBSERVATIONS[name]().encode()

    def answer(socket: Any) -> None:
        for text in socket:
            if json.loads(text)["type"] == "state":
                socket.send(json.dumps({"type": "state", "data": {}}))
            else:
                with suppress(ConnectionClosed):
                    socket.send(large, text=True)

    with serve_sockets(answer, "127.0.0.1", 0, max_size=None, compression=None) as server:  # its work is not the loop's
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        async with beside_others():
            session = await open_session(f"ws://127.0.0.1:{port}/ws")
            with pytest.raises(EnvironmentFailed):
                await session.reset({})
            await session.close()
        server.shutdown()


async def test_an_answer_within_the_bounds_is_read() -> None:
    def honest() -> Any:
        yield json.dumps({"idempotent": True, "screen": [0] * 100_800}).encode()

    async with http_server(honest) as url:
        pool = ServerPool()
        async with pool.run():
            assert await pool.is_idempotent(url)
