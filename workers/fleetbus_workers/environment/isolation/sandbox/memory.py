"""The memory of all processes of a sandbox together: limits of the kernel hold for each process alone."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import anyio
import anyio.to_thread

from fleetbus.concurrency.task_groups import open_first_error_task_group

BUSY_SECONDS, IDLE_ROUNDS = 0.1, 10
"""How often sandboxes are looked at while code runs, and every how many rounds of that when none does."""

MAX_PROCESSES = 4096
_COUNTED = (b"RssAnon", b"RssShmem", b"VmSwap")

INODE_BYTES = 1200
"""About what an empty file in memory takes: its inode and its name."""

MESSAGE_BYTES = 128 << 10
"""How far the last message may take a socket beyond its buffer."""


class WatchedProcess(Protocol):
    """A sandbox that may be looked at, and ended."""

    busy: bool
    memory_limit: int

    @property
    def process_id(self) -> int | None: ...

    @property
    def scratch(self) -> Sequence[int]:
        """Its folders in memory, opened."""

    def end(self, reason: Literal["memory"]) -> None: ...


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
        async with open_first_error_task_group() as tasks:
            tasks.start_soon(self._watch)
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        rounds = 0
        while True:
            await anyio.sleep(BUSY_SECONDS)
            rounds += 1
            looked_at = {
                sandbox: (sandbox.process_id, sandbox.scratch)
                for sandbox in self._watched
                if sandbox.process_id is not None and (sandbox.busy or rounds % IDLE_ROUNDS == 0)
            }
            if not looked_at:
                continue
            used = await anyio.to_thread.run_sync(
                lambda seen: [memory_of_tree(process) + memory_of_files(folders) for process, folders in seen],
                [*looked_at.values()],
            )
            for (sandbox, (process, _)), size in zip(looked_at.items(), used, strict=True):
                if size > sandbox.memory_limit and sandbox.process_id == process:
                    sandbox.end("memory")


def memory_of_files(folders: Sequence[int]) -> int:
    """Bytes that file systems in memory take, for content and for names, which no process is charged for."""
    total = 0
    for folder in folders:
        try:
            state = os.fstatvfs(folder)
        except OSError:
            continue  # closed meanwhile
        total += (state.f_blocks - state.f_bfree) * state.f_frsize + (state.f_files - state.f_ffree) * INODE_BYTES
    return total


def memory_of_tree(process: int) -> int:
    """Bytes of memory that ``process`` and everything below it have of their own or share by writing to it, and the most that
    the buffers of their sockets can take. Pages that a fork shares count twice."""
    total, waiting, seen, last = 0, [process], 0, process
    while waiting and seen < MAX_PROCESSES:
        current = waiting.pop()
        seen += 1
        last = max(last, current)
        try:
            with open(f"/proc/{current}/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
            total += sum(int(fields[name].split()[0]) << 10 for name in _COUNTED if name in fields)
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children", "rb") as file:
                    waiting += map(int, file.read().split())
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return total + (_memory_of_sockets(last) if last != process else 0)


def _memory_of_sockets(process: int) -> int:
    """The most that the sockets in the network of ``process`` can take, those without a descriptor included."""
    try:
        with open(f"/proc/{process}/net/sockstat", "rb") as file:
            count = int(file.readline().split()[2])  # "sockets: used 3"
        with open("/proc/sys/net/core/wmem_default", "rb") as file:
            return count * (int(file.read()) + MESSAGE_BYTES)
    except (OSError, IndexError, ValueError):
        return 0  # it has ended meanwhile
