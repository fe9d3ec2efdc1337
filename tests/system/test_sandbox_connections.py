"""The forwarding of an isolated agent's connections to its worker: how many there may be, and which of them give way."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fleetbus_workers.environment.isolation.sandbox.inside import agent

MUCH = b"x" * 12_000_000
"""More than the system keeps of what nobody reads."""

Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def forwarded(path: Path) -> AsyncIterator[Open]:
    """Opens connections to a worker that answers each line but "wait" with the same line, and "much" with much."""
    served: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line != b"wait\n":
                    writer.write(MUCH if line == b"much\n" else line)
                    await writer.drain()
        writer.close()
        await writer.wait_closed()

    listener = socket.create_server(("127.0.0.1", 0))
    async with await asyncio.start_unix_server(answer, path):
        forwarding = asyncio.create_task(agent.forward(listener, str(path)))
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            opened.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in opened:
                writer.close()
            await asyncio.gather(*(each for each in served if each))
            forwarding.cancel()
            with suppress(asyncio.CancelledError):
                await forwarding


async def say(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: bytes) -> None:
    connection[1].write(line)
    await connection[1].drain()


async def test_a_connection_takes_the_place_of_one_that_was_answered_and_of_none_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "CONNECTIONS", 2)
    monkeypatch.setattr(agent, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.01)
    async with asyncio.timeout(10), forwarded(tmp_path / "worker.sock") as connect:
        idle, waiting = await connect(), await connect()
        for connection in (idle, waiting):
            await say(connection, b"hello\n")
            assert await connection[0].readline() == b"hello\n"
        await say(waiting, b"wait\n")

        further = await connect()
        await say(further, b"more\n")
        assert await further[0].readline() == b"more\n"
        assert await idle[0].read() == b""
        await say(waiting, b"still\n")
        assert await waiting[0].readline() == b"still\n"


async def test_a_connection_keeps_its_place_until_the_agent_has_read_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "CONNECTIONS", 1)
    monkeypatch.setattr(agent, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.01)
    looked = asyncio.Event()
    close_if_idle = agent.Link.close_if_idle

    def look(link: agent.Link) -> None:
        close_if_idle(link)
        if link._answered and time.monotonic() - link._spoke >= agent.IDLE_SECONDS:
            looked.set()

    monkeypatch.setattr(agent.Link, "close_if_idle", look)
    async with asyncio.timeout(20), forwarded(tmp_path / "worker.sock") as connect:
        slow = await connect()
        await say(slow, b"much\n")
        further = await connect()
        await say(further, b"more\n")
        await looked.wait()

        assert await slow[0].readexactly(len(MUCH)) == MUCH
        assert await further[0].readline() == b"more\n"


async def test_a_connection_that_waits_has_its_turn_before_those_that_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "CONNECTIONS", 1)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.1)
    looks = asyncio.Semaphore(0)
    monkeypatch.setattr(agent.Link, "close_if_idle", lambda _: looks.release())
    answered: list[bytes] = []

    async def ask(line: bytes, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        await say(connection, line)
        answered.append(await connection[0].readline())
        connection[1].close()

    async with asyncio.timeout(20), forwarded(tmp_path / "worker.sock") as connect:
        holder = await connect()
        await say(holder, b"hello\n")
        assert await holder[0].readline() == b"hello\n"
        first = asyncio.create_task(ask(b"first\n", await connect()))
        await looks.acquire()
        monkeypatch.setattr(agent, "LOOK_SECONDS", 60.0)
        second = asyncio.create_task(ask(b"second\n", await connect()))
        await looks.acquire()
        await looks.acquire()  # the first has looked again
        holder[1].close()
        await asyncio.gather(first, second)
    assert answered == [b"first\n", b"second\n"]
