"""One child process of `fleetbus up`: in a session of its own, its output in a file, bound to us by a pipe.

A terminal's Ctrl-C reaches `up` alone; stopping a child takes its grandchildren along.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec

TAIL_LINES = 12


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: ``command`` makes the command line of the n-th start (0 first), ``log`` collects its output.

    ``stop_limit_seconds`` counts from when it is asked to stop, however long others took; those with a smaller limit are
    asked first.
    ``grace_seconds`` is for a process that must clean up beyond its own group: it is never killed without that much notice.
    """

    name: str
    stop_limit_seconds: float
    grace_seconds: float = 0.0
    command: Callable[[int], Sequence[str]]
    log: Path
    environment: Mapping[str, str]
    output: Sequence[Path] = ()

    def start(self, number: int) -> AbstractAsyncContextManager[ChildProcess]:
        """See `start_process`."""
        return start_process(self, number)


class ChildProcess:
    """A started `ProcessPlan`."""

    def __init__(self, plan: ProcessPlan, process: anyio.abc.Process) -> None:
        self.plan = plan
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """True if it has ended, though what it started may not have."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Its exit status, negative for a signal."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once unless it has a grace; harmless when nothing is left."""
        if self.plan.grace_seconds:
            self.terminate()
        else:
            self._kill_group()

    async def end(self) -> None:
        """The whole process group is gone when this returns."""
        if self.plan.grace_seconds:
            self.terminate()
            with anyio.move_on_after(self.plan.grace_seconds):
                await self.wait()
        self._kill_group()
        await self._process.aclose()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@asynccontextmanager
async def start_process(plan: ProcessPlan, start: int = 0) -> AsyncIterator[ChildProcess]:
    """The running process; leaving ends its whole group."""
    with plan.log.open("ab") as output:
        process = await anyio.open_process(
            plan.command(start),
            stdin=subprocess.PIPE,  # kept open and never written: its end of file shows the child that we are gone
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(plan.environment),
        )
    child = ChildProcess(plan, process)
    try:
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.end()


def tail(log: Path) -> list[str]:
    """The last lines of a log file, to show why its process ended."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
