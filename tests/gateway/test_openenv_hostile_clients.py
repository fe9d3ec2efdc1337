"""WebSocket clients that trickle, flood, take nothing, or talk nonsense: each ends, its slot is free, others play meanwhile."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import SocketAttribute, SocketStream

from fleetbus_workers.serving.connections import Bounds
from tests.support.openenv_gateway import GatewayFixtures, gateway

pytestmark = pytest.mark.integration

IDLE_SOCKETS = 150
DELAY_SECONDS = 0.5
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings every second, and answers within one."""
    monkeypatch.setattr("fleetbus_workers.serving.serve.PING_SECONDS", 1.0)
    monkeypatch.setattr("fleetbus_workers.serving.web_sockets.END_SECONDS", 0.5)


def frame(payload: bytes, *, opcode: int = 1, claimed: int | None = None) -> bytes:
    """A masked frame of a client; ``claimed`` is the length in its head if it lies."""
    length = len(payload) if claimed is None else claimed
    head = bytes([0x80 | opcode])
    if length < 126:
        head += bytes([0x80 | length])
    else:
        head += bytes([0x80 | 127]) + length.to_bytes(8, "big")
    return head + bytes(4) + payload


def build_request_frame(kind: str, **data: Any) -> bytes:
    return frame(json.dumps({"type": kind} | ({"data": data} if data else {})).encode())


async def complete_handshake(here: GatewayFixtures) -> SocketStream:
    """A connection that is a WebSocket by now, and answers nothing by itself."""
    stream = await anyio.connect_tcp("127.0.0.1", port_of(here))
    await stream.send(HANDSHAKE)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive()
    assert received.startswith(b"HTTP/1.1 101")
    return stream


def port_of(here: GatewayFixtures) -> int:
    return int(here.url.rpartition(":")[2])


async def all_closed(here: GatewayFixtures) -> None:
    """Until the gateway has no connection left."""
    process = psutil.Process()

    def one_is_open() -> bool:
        own = (each for each in process.net_connections("tcp") if each.laddr.port == port_of(here))
        return any(each.status in ("ESTABLISHED", "CLOSE_WAIT") for each in own)

    while one_is_open():  # noqa: ASYNC110 - sockets of the kernel, which nobody tells about
        await anyio.sleep(0.05)


async def others_play(here: GatewayFixtures) -> None:
    async with here.socket() as player:
        await player.ask("reset")
        assert (await player.ask("step", text="x"))["data"]["reward"] == 0.5


async def test_a_frame_that_never_ends_ends_its_connection() -> None:
    async with gateway() as here, await complete_handshake(here) as stream:
        await stream.send(build_request_frame("reset") + frame(b"{", claimed=1 << 20))
        await others_play(here)
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            while True:
                await stream.send(b" ")
                with anyio.move_on_after(0.1):
                    await stream.receive()
        await all_closed(here)
        await here.empty()


async def never_taken(stream: SocketStream) -> None:
    """Ask for more than all buffers hold, for as long as the gateway reads."""
    stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reset = build_request_frame("reset", prompt="x" * 30_000)
    try:
        for _ in range(600):
            await stream.send(reset)
    except anyio.BrokenResourceError:
        pass


async def test_a_client_that_takes_no_answers_loses_its_connection_and_its_slot() -> None:
    """It answers no ping, and a polite end would wait for ever behind what it does not take."""
    async with gateway(slots=1) as here, await complete_handshake(here) as stream, anyio.create_task_group() as group:
        group.start_soon(never_taken, stream)
        await here.world.begun.wait()
        await here.empty()
        await all_closed(here)
        await others_play(here)


async def test_a_client_that_takes_nothing_is_cut_before_any_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.serving.serve.PING_SECONDS", 600.0)
    bounds = Bounds(send_seconds=0.5)
    async with (
        gateway(slots=1, bounds=bounds) as here,
        await complete_handshake(here) as stream,
        anyio.create_task_group() as group,
    ):
        group.start_soon(never_taken, stream)
        await here.world.begun.wait()
        await here.empty()
        await all_closed(here)


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"x", opcode=3),
        b"\x81\x05hello",
        frame(b"\xff\xfe"),
        frame(b"", claimed=1 << 62),
        frame(b"", claimed=(16 << 20) + 1),
        frame(b"x" * 200, opcode=9),
        os.urandom(4096),
        frame(b"\x00", opcode=8),
    ],
    ids=["opcode", "no mask", "no text", "endless", "too large", "long ping", "noise", "bad close"],
)
async def test_what_is_no_frame_ends_the_connection_and_frees_its_slot(sent: bytes) -> None:
    async with gateway(slots=1) as here, await complete_handshake(here) as stream:
        await stream.send(build_request_frame("reset") + sent)
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            while True:
                await stream.receive()
        await here.empty()
        await all_closed(here)
        await others_play(here)


async def test_frames_in_one_piece_are_answered_one_after_the_other() -> None:
    async with gateway() as here, await complete_handshake(here) as stream:
        await stream.send(
            build_request_frame("reset") + build_request_frame("step", text="x") + build_request_frame("state") * 100
        )
        received = b""
        while received.count(b'"step_count": 1') < 100:
            received += await stream.receive()


@pytest.mark.parametrize("path", [b"/nowhere", b"/health"])
async def test_a_handshake_that_leads_nowhere_is_refused(path: bytes) -> None:
    async with gateway() as here, await anyio.connect_tcp("127.0.0.1", port_of(here)) as stream:
        await stream.send(HANDSHAKE.replace(b"/ws ", path + b" "))
        received = b""
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            while True:
                received += await stream.receive()
        assert received.startswith(b"HTTP/1.1 403")
        await all_closed(here)


async def test_idle_sockets_hold_no_slots_and_are_in_nobody_s_way() -> None:
    async with gateway(slots=1) as here, AsyncExitStack() as stack:
        for _ in range(IDLE_SOCKETS):
            await stack.enter_async_context(here.socket())
        await others_play(here)


async def test_a_socket_that_never_begins_is_closed_and_one_that_plays_is_not() -> None:
    async with gateway(idle_timeout=0.5) as here, here.socket() as idle, here.socket() as player:
        await player.ask("reset")
        await idle.connection.wait_closed()
        assert idle.connection.close_code == 1001
        assert (await player.ask("step", text="x"))["data"]["reward"] == 0.5


@pytest.mark.parametrize("payload", [b"", b"{}", b"x"])
async def test_a_flood_of_messages_that_say_nothing_delays_nobody(payload: bytes) -> None:
    async with gateway() as here:
        flooding, other = await complete_handshake(here), await complete_handshake(here)
        async with flooding, other:
            await flooding.send(frame(payload) * (300_000 // len(frame(payload))))
            began = time.monotonic()
            await other.send(build_request_frame("reset"))
            with anyio.fail_after(30):
                await other.receive()
            assert time.monotonic() - began < DELAY_SECONDS
            with anyio.fail_after(10), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                while True:
                    await flooding.receive()
