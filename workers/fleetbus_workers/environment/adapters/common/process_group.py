"""A command of an episode as a process of this machine, with all that it starts: its output, and its end, bounded in time."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import anyio
from anyio.abc import Process

from fleetbus.python_process import build_parent_death_command
from fleetbus_workers.environment.base import EnvironmentFailed

STOP_SECONDS = 5.0
LAST_OUTPUT_BYTES = 4000


class ProcessGroup:
    """One running command, and all that it starts: a process group of its own, which ends with this process."""

    def __init__(self, process: Process, output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        called: str,
        variables: Mapping[str, str],
        folder: Path | None = None,
        file_bytes: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """``file_bytes`` bounds every file that it writes, its output included. Raises `EnvironmentFailed`, which names what is
        ``called`` so, when the command cannot be started."""
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
                pass_fds=pass_fds,
            )
        except BaseException as error:
            output.close()
            if isinstance(error, OSError):
                raise EnvironmentFailed(f"{called} cannot be started: {error}") from error
            raise
        if file_bytes is not None and sys.platform == "linux":
            try:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
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

    def read_last_line(self) -> str:
        """The last line that it wrote to standard output or standard error, after a colon; empty if there is none."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    async def end_all(self) -> None:
        """SIGTERM to all that the command started, SIGKILL to what does not end."""
        with anyio.CancelScope(shield=True):
            self._signal_group(signal.SIGTERM)
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()
            self._signal_group(signal.SIGKILL)
            with anyio.move_on_after(STOP_SECONDS):
                await self._process.wait()

    async def stop(self) -> None:
        """End all of it, and forget what it wrote."""
        await self.end_all()
        with anyio.CancelScope(shield=True):
            await self._process.aclose()
        self._output.close()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # all of it has ended
