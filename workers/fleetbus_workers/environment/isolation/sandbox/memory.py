"""The memory of all processes of a sandbox together: limits of the kernel hold for each process alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import anyio.to_thread

BUSY_SECONDS, IDLE_ROUNDS = 0.1, 10
"""How often sandboxes are looked at while code runs, and every how many rounds of that when none does."""

MAX_PROCESSES = 4096
_COUNTED = (b"RssAnon", b"RssShmem", b"VmSwap")


class WatchedProcess(Protocol):
    """A sandbox that may be looked at, and ended."""

    busy: bool
    memory_limit: int

    @property
    def process_id(self) -> int | None: ...

    def end(self, reason: str) -> None: ...


class MemoryWatch:
    """Ends sandboxes whose processes together use more than their limit; use it inside `run`."""

    def __init__(self) -> None:
        self._watched: set[WatchedProcess] = set()

    def add(self, sandbox: WatchedProcess) -> None:
        self._watched.add(sandbox)

    def discard(self, sandbox: WatchedProcess) -> None:
        self._watched.discard(sandbox)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        rounds = 0
        while True:
            await anyio.sleep(BUSY_SECONDS)
            rounds += 1
            looked_at = {
                sandbox: sandbox.process_id
                for sandbox in self._watched
                if sandbox.process_id is not None and (sandbox.busy or rounds % IDLE_ROUNDS == 0)
            }
            if not looked_at:
                continue
            used = await anyio.to_thread.run_sync(
                lambda seen: [memory_of_tree(process) for process in seen], [*looked_at.values()]
            )
            for (sandbox, process), size in zip(looked_at.items(), used, strict=True):
                if size > sandbox.memory_limit and sandbox.process_id == process:
                    sandbox.end("memory")


def memory_of_tree(process: int) -> int:
    """Bytes of memory that ``process`` and everything below it have of their own or share by writing to it (files in memory,
    too); pages that a fork shares count twice."""
    total, waiting, seen = 0, [process], 0
    while waiting and seen < MAX_PROCESSES:
        current = waiting.pop()
        seen += 1
        try:
            with open(f"/proc/{current}/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
            total += sum(int(fields[name].split()[0]) << 10 for name in _COUNTED if name in fields)
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children", "rb") as file:
                    waiting += map(int, file.read().split())
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return total
