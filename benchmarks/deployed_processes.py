"""Processes of a deployment that somebody operates: each started again when it ends, and written down when nobody asked it to.

Above it are `benchmarks.soak_deployed` and `benchmarks.replaced_keys`; below it are the commands of the roles and viewers. It
signals only processes that it started, by their ids.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec

RESTART_SECONDS = 1.0
STOP_SECONDS = 30.0


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended although nobody asked it to; ``said`` is its last line."""

    place: str
    status: int
    during: str
    said: str


class Place:
    """One command, run by one process after another; its output goes to one file. ``is_named``: each process gets its own
    ``--name``."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, is_named: bool) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.deaths: list[Death] = []
        self.during = "start"
        self._command = command
        self._is_named = is_named
        self._starts = 0
        self._is_asked = False
        self._is_retired = False
        self._process: anyio.abc.Process | None = None
        self._ended = anyio.Event()
        self._started = anyio.Event()
        self._may_start = anyio.Event()
        self._may_start.set()

    async def keep_running(self) -> None:
        """Start it, and start it again whenever it ends, until `retire`."""
        while not self._is_retired:
            await self._may_start.wait()
            await self._run_once()
            if not self._is_retired:
                await anyio.sleep(RESTART_SECONDS)

    async def restart(self) -> None:
        """Ask it to end, as an operator does, and return when another one runs."""
        self.expect_end()
        await self._end()
        await self._started.wait()

    def expect_end(self) -> None:
        """What the caller does next ends the process."""
        self._is_asked = True
        self._started = anyio.Event()

    async def wait_until_ended(self, seconds: float) -> None:
        """Return when the process that `expect_end` was said of has ended, or none runs; it is written down if it still does
        after ``seconds``."""
        if self._process is None:
            return
        with anyio.move_on_after(seconds):
            await self._ended.wait()
            return
        self._note(0, f"it goes on {seconds:g} s after it should have ended")

    def hold(self) -> None:
        """Start it no more until `release`: what it needs is not there."""
        self._may_start = anyio.Event()

    def release(self) -> None:
        self._may_start.set()

    def kill(self) -> bool:
        """End the process at once, as a machine that is lost does; False if none runs."""
        if self._process is None or self._is_asked:
            return False
        self.expect_end()
        with suppress(ProcessLookupError):
            self._process.kill()
        return True

    async def wait_until_restarted(self) -> None:
        """Return when the process that `expect_end` was said of has ended, and another one runs."""
        await self._started.wait()

    async def retire(self) -> None:
        """Ask it to end, for good."""
        self._is_retired = self._is_asked = True
        await self._end()

    def count_lines(self) -> int:
        """Lines of its output but for those that tell of a step of training."""
        return sum(b"] trained " not in line for line in self.log.read_bytes().splitlines())

    async def _end(self) -> None:
        process, ended = self._process, self._ended
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_SECONDS):
            await ended.wait()
            return
        self._note(-signal.SIGKILL, "it did not end when it was asked to")
        with suppress(ProcessLookupError):
            process.kill()
        await ended.wait()

    async def _run_once(self) -> None:
        name = ["--name", f"{self.name}-{self._starts}"] if self._is_named else []
        self._starts += 1
        with self.log.open("ab") as output:
            process = await anyio.open_process(
                [*self._command, *name], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._process, self._ended, self._is_asked = process, anyio.Event(), self._is_retired
        self._started.set()
        try:
            status = await process.wait()
            if not self._is_asked:
                self._note(status, self._read_last_line())
        finally:
            self._process = None
            with suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()
            self._ended.set()

    def _note(self, status: int, said: str) -> None:
        self.deaths.append(Death(place=self.name, status=status, during=self.during, said=said))

    def _read_last_line(self) -> str:
        return (self.log.read_text(errors="replace").splitlines() or [""])[-1][:300]
