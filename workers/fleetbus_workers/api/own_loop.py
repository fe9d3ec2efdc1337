"""Asynchronous work in an event loop of its own: for callers without one, and for those whose loop may block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.streams.memory import MemoryObjectSendStream

from fleetbus.concurrency.wakeup import ThreadWakeup

T = TypeVar("T")

CHUNK_ITEMS = 256
CHUNKS_AHEAD = 2
"""What `iterate_in_own_loop` reads ahead of its reader."""


async def run_in_own_loop(function: Callable[[], Awaitable[T]]) -> T:
    """The result of ``function`` in a loop of its own; cancelling cancels it and waits until it has ended."""
    wakeup = ThreadWakeup()
    opened: AbstractContextManager[BlockingPortal] = start_blocking_portal()
    portal = opened.__enter__()
    future: Future[T] = portal.start_task_soon(function)
    future.add_done_callback(lambda _: wakeup.notify())
    try:
        while not future.done():
            await wakeup.wait()
    finally:
        future.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(opened.__exit__, None, None, None)
        wakeup.close()
    return future.result()


def iterate_in_own_loop(make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    """The items of an asynchronous iterator that runs in a loop of its own; leaving early, or an error, ends it."""
    with start_blocking_portal() as portal:
        send, receive = anyio.create_memory_object_stream[list[T]](CHUNKS_AHEAD)
        future = portal.start_task_soon(_send_chunks, make, send)
        try:
            while True:
                try:
                    chunk = portal.call(receive.receive)
                except anyio.EndOfStream:
                    break
                yield from chunk
            future.result()
        finally:
            future.cancel()
            receive.close()


async def _send_chunks(make: Callable[[], AsyncIterator[T]], send: MemoryObjectSendStream[list[T]]) -> None:
    chunk: list[T] = []
    with send:
        async for item in make():
            chunk.append(item)
            if len(chunk) >= CHUNK_ITEMS:
                await send.send(chunk)
                chunk = []
        if chunk:
            await send.send(chunk)
