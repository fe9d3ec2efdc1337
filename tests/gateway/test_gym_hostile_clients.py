"""Clients that hold on to connections: nobody else waits for them."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import psutil
import pytest

from fleetbus_workers.serving.protocol_choice import reserve_descriptors
from tests.support.gym_service import Handler, Wire, serve_gym

IDLE_CONNECTIONS = 400
THOUSANDS = 2500


async def play(wire: Wire) -> None:
    session = (await wire.connect({"goal": 1}))["session_id"]
    assert (await wire.call(session, "step", action_str="x"))["done"] is True
    await wire.call(session, "close")


def port_of(wire: Wire) -> int:
    return int(wire.url.rpartition(":")[2])


async def test_hundreds_of_idle_connections_are_in_nobody_s_way() -> None:
    async with serve_gym(Handler()) as wire, AsyncExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port_of(wire)))
        await play(wire)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_thousands_of_idle_connections_are_in_nobody_s_way_and_go_when_they_go() -> None:
    """Both ends are in this process: two files for each connection."""
    assert reserve_descriptors(2 * THOUSANDS) == 2 * THOUSANDS, "this machine allows too few open files"
    process = psutil.Process()
    async with serve_gym(Handler(), seconds=280) as wire:
        await play(wire)
        before = process.num_fds()
        async with AsyncExitStack() as stack:
            opening = anyio.CapacityLimiter(100)

            async def idle() -> None:
                async with opening:
                    await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port_of(wire)))

            async with anyio.create_task_group() as group:
                for _ in range(THOUSANDS):
                    group.start_soon(idle)
            await play(wire)
            assert process.num_fds() - before >= THOUSANDS
        while process.num_fds() > before + 10:  # noqa: ASYNC110 - what the kernel still closes
            await anyio.sleep(0.1)
        await play(wire)


async def test_bodies_that_trickle_in_hold_no_place_among_the_calls() -> None:
    head = b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with serve_gym(Handler(), max_inflight=1, admit_timeout=0.5) as wire, AsyncExitStack() as stack:
        for _ in range(20):
            stream = await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port_of(wire)))
            await stream.send(head)
        await play(wire)


async def test_a_body_that_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.serving.request_body.BODY_SECONDS", 0.2)
    head = b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with serve_gym(Handler()) as wire, await anyio.connect_tcp("127.0.0.1", port_of(wire)) as stream:
        await stream.send(head)
        assert b" 408 " in await stream.receive()


async def test_a_request_that_is_cut_off_leaves_nothing_behind() -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        async with await anyio.connect_tcp("127.0.0.1", port_of(wire)) as stream:
            await stream.send(b"POST /connect HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await play(wire)
    assert handler.created == handler.closed == 1
