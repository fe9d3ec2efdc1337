"""An agent as a process of this machine: its command, what it is told by variables, and its end, bounded in time and size."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import anyio
from anyio.abc import Process

from fleetbus.parent_death import build_parent_death_command
from fleetbus_workers.environment.base import EnvironmentFailed

STOP_SECONDS = 5.0
OUTPUT_BYTES = 64 << 20
"""Largest file that an agent may write, its own output included."""

LAST_OUTPUT_BYTES = 4000


class AgentProcess:
    """One running agent, and all that it starts: a process group of its own."""

    def __init__(self, process: Process, output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    @classmethod
    async def start(cls, command: Sequence[str], *, folder: Path, variables: Mapping[str, str]) -> AgentProcess:
        """Raises `EnvironmentFailed` when the command cannot be started."""
        output = tempfile.TemporaryFile()
        try:
            process = await anyio.open_process(
                build_parent_death_command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )
        except BaseException as error:
            output.close()
            if isinstance(error, OSError):
                raise EnvironmentFailed(f"the agent cannot be started: {error}") from error
            raise
        if sys.platform == "linux":
            try:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
            except ProcessLookupError:
                pass  # it has ended already
        return cls(process, output)

    async def wait(self) -> int:
        """Its exit status; negative: the signal that ended it."""
        return await self._process.wait()

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.returncode

    def read_last_output(self) -> str:
        """The end of what it wrote to standard output and standard error."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
        return self._output.read().decode(errors="replace").strip()

    async def stop(self) -> None:
        """SIGTERM to all that the agent started, SIGKILL to what does not end."""
        with anyio.CancelScope(shield=True):
            self._signal_group(signal.SIGTERM)
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            self._signal_group(signal.SIGKILL)
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            await self._process.aclose()
        self._output.close()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # all of it has ended
