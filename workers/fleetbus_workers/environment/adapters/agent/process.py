"""An agent as a process of this machine: in the sandbox or as this user, and what it may hold."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process

from fleetbus_workers.environment.adapters.common.process_group import ProcessGroup
from fleetbus_workers.environment.isolation.sandbox import Isolation
from fleetbus_workers.environment.isolation.sandbox.backends import INSIDE, build_python_command
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.ownership import Labels, build_label_variables, build_owner_variables, sweep_processes


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one agent. ``file_bytes`` is the largest file, its own output included; ``folder_bytes`` all of its working
    folder; ``memory_bytes`` what it and all that it started hold together."""

    file_bytes: int = 64 << 20
    folder_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30
    processes: int = 512
    open_files: int = 1024
    scratch_bytes: int = 256 << 20


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox of an agent: what it sees, and the socket behind the only ``port`` that it can reach."""

    isolation: Isolation
    visible: tuple[Path, ...]
    hidden: tuple[Path, ...]
    socket: str
    port: int
    users: tuple[int, int]


class AgentProcess(ProcessGroup):
    """One running agent, and all that it starts: a sandbox, or a process group of its own; see `WatchedProcess`."""

    def __init__(self, process: Process, output: IO[bytes]) -> None:
        super().__init__(process, output)
        self._watch: MemoryWatch | None = None
        self._labels: Labels | None = None
        self._had_too_much = ""
        self._lifeline: int | None = None
        self.busy = True
        self.memory_limit = AgentLimits().memory_bytes
        self.scratch: Sequence[int] = ()

    def watch(self, watch: MemoryWatch, limits: AgentLimits) -> None:
        """Have it ended when it holds too much memory."""
        self._watch, self.memory_limit = watch, limits.memory_bytes
        watch.add(self)

    def tie(self, lifeline: int) -> None:
        """Close this with it: a sandbox ends when its worker's side of a pipe is closed, by anyone."""
        self._lifeline = lifeline

    def find_by(self, labels: Labels) -> None:
        """End with it all that carries these labels."""
        self._labels = labels

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process.returncode is None else None

    def end(self, reason: str) -> None:
        """Kill all of it, for having too much of something."""
        self._had_too_much = self._had_too_much or reason
        self._signal_group(signal.SIGKILL)

    def read_last_line(self) -> str:
        return f": it had too much {self._had_too_much}" if self._had_too_much else super().read_last_line()

    async def end_all(self) -> None:
        """A sandbox ends at once, without being asked."""
        if self._watch is not None:
            self._watch.discard(self)
        await super().end_all()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._labels is not None:
            wanted = self._labels.episode
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(sweep_processes, lambda labels: labels.episode == wanted)


async def start_as_this_user(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], limits: AgentLimits, labels: Labels
) -> AgentProcess:
    """All that it starts is found again by its ``labels``. Raises `EnvironmentFailed`."""
    labelled = {**variables, **build_label_variables(labels)}
    agent = await AgentProcess.start(
        command, called="the agent", variables=labelled, folder=folder, file_bytes=limits.file_bytes
    )
    agent.find_by(labels)
    return agent


async def start_in_sandbox(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], limits: AgentLimits, confinement: Confinement
) -> AgentProcess:
    """Raises `EnvironmentFailed`."""
    settings = _write_settings(command, folder, variables, limits, confinement)
    inside, lifeline = os.pipe()
    try:
        sandbox = confinement.isolation.command(
            build_python_command(INSIDE / "agent.py", str(settings), str(inside)),
            visible=[INSIDE, *confinement.visible],
            tools=True,
            scratch_bytes=limits.scratch_bytes,
            writable={str(folder): str(folder)},
            hidden=confinement.hidden,
            loopback=True,
            proc=True,
        )
        agent = await AgentProcess.start(
            sandbox,
            called="the agent",
            variables=build_owner_variables(),
            folder=Path("/"),
            file_bytes=limits.file_bytes,
            pass_fds=(settings, inside),
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(settings)
        os.close(inside)
    agent.tie(lifeline)
    return agent


def _write_settings(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], limits: AgentLimits, confinement: Confinement
) -> int:
    """A file in memory: command lines can be read by everybody, and the variables hold the session's key."""
    settings: dict[str, object] = {
        "command": list(command),
        "variables": dict(variables),
        "folder": str(folder),
        "port": confinement.port,
        "socket": confinement.socket,
        "users": confinement.users,
        "limits": {"NPROC": limits.processes, "NOFILE": limits.open_files, "FSIZE": limits.file_bytes, "CORE": 0},
    }
    descriptor = os.memfd_create("agent", os.MFD_CLOEXEC)
    os.write(descriptor, msgspec.json.encode(settings))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
