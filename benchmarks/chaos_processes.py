"""A fleet of real processes that may be struck: started, killed, paused, started again under new names, and all ended.

It plays the supervisor. Above it is `benchmarks.chaos`; below it are the role commands and one nats-server. It signals only
processes that it started, by their ids, and never their descendants: those have to end by themselves.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import psutil

from benchmarks.chaos_faults import Fault
from fleetbus.bus.base import Bus
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.concurrency.notifier import Notifier
from fleetbus.errors import BusError
from fleetbus_schemas import ControlAnswered, ControlRequested, MalformedMessage, Subjects, decode, encode

UNPLANNED_RESTART_SECONDS = 0.5
PING_SECONDS = 0.3
CONFIG = "config.json"
MAIN_POLICY = "default"
LEAVE_SECONDS = 6.0
"""What descendants of a dead process get to notice that they are alone."""


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happened. ``name`` is the worker's, ``held`` what it said to be busy with just before.

    ``back_ns`` is when a server was ready again, or a paused process went on; ``alive`` are the workers that ran by then.
    """

    role: str
    kind: str
    name: str
    time_ns: int
    back_ns: int = 0
    held: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()


class ProcessExit(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended. ``planned``: it was told to, or killed."""

    name: str
    status: int
    planned: bool


class Member:
    """One place in the fleet, filled by one process after another; each is a new worker with a name of its own."""

    def __init__(
        self,
        role: str,
        place: str,
        command: Sequence[str],
        folder: Path,
        ended: list[ProcessExit],
        *,
        policy: str = "",
        final: bool = False,
    ) -> None:
        self.role = role
        self.policy = policy
        self._final = final
        self._place = place
        self._command = command
        self._folder = folder
        self._ended = ended
        self._starts = 0
        self._restart_seconds: float | None = None
        self._retired = False
        self.gone = anyio.Event()
        self._descendants: dict[int, psutil.Process] = {}
        self.process: anyio.abc.Process | None = None
        self.name = ""
        self.paused = False

    @property
    def is_targetable(self) -> bool:
        """Running, and not under another fault."""
        return self.process is not None and not self.paused and self._restart_seconds is None and not self._retired

    async def keep_running(self) -> None:
        """Start it, and start it again whenever it ends, until `retire`, or until a final one has done what it had to."""
        while not self._retired:
            await self._run_once()
            delay, self._restart_seconds = self._restart_seconds, None
            if not self._retired:
                await anyio.sleep(UNPLANNED_RESTART_SECONDS if delay is None else delay)
        self.gone.set()

    def send(self, sign: signal.Signals, restart_seconds: float | None = None) -> int:
        """Signal the process; the time just before. ``restart_seconds``: this ends it, start another after so long."""
        assert self.process is not None
        self._remember_descendants()
        if restart_seconds is not None:
            self._restart_seconds = restart_seconds
        now = time.time_ns()
        with suppress(ProcessLookupError):
            self.process.send_signal(sign)
        return now

    async def retire(self, within_seconds: float) -> bool:
        """SIGTERM, for good; False if it did not end in time and was killed."""
        self._retired = True
        if self.process is not None:
            self.send(signal.SIGTERM)
        with anyio.move_on_after(within_seconds):
            await self.gone.wait()
            return True
        if self.process is not None:
            self.send(signal.SIGKILL)
        await self.gone.wait()
        return False

    def living_descendants(self) -> list[psutil.Process]:
        """Processes that this member's processes started and that still run."""
        return [process for process in self._descendants.values() if _is_running(process)]

    async def _run_once(self) -> None:
        self.name = f"{self._place}-{self._starts}"
        self._starts += 1
        with (self._folder / f"{self.name}.log").open("ab") as output:
            process = await anyio.open_process(
                [*self._command, "--name", self.name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process = process
        try:
            status = await process.wait()
            self._retired = self._retired or (self._final and status == 0)
            planned = self._retired or self._restart_seconds is not None
            self._ended.append(ProcessExit(name=self.name, status=status, planned=planned))
        finally:
            self.process = None
            with suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()

    def _remember_descendants(self) -> None:
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            self._descendants.update({child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)})


class ChaosDeployment:
    """The members of a run and its server. ``injected`` and ``ended`` tell what happened, ``skipped`` counts faults that found
    nobody to strike. Workers are struck within ``patience`` seconds, at the next `moment` that somebody tells of."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        server: NatsServerProcess,
        folder: Path,
        places: dict[str, int],
        *,
        patience: float = 0.0,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._server = server
        self._folder = folder
        self._patience = patience
        self.moment = Notifier()
        self.injected: list[InjectedFault] = []
        self.ended: list[ProcessExit] = []
        self.skipped = 0
        self.members = [
            self.member(role, f"{role}-{index}" if count > 1 else role)
            for role, count in places.items()
            for index in range(count)
        ]

    def member(
        self, role: str, place: str, *arguments: str, policy: str = MAIN_POLICY, config: str = CONFIG, final: bool = False
    ) -> Member:
        """A further member, which the caller keeps running; a ``final`` one may end by itself."""
        command = [
            sys.executable,
            "-m",
            "fleetbus_workers.cli",
            role,
            "--config",
            str(self._folder / config),
            *arguments,
        ]
        command.append("--supervised")
        return Member(role, place, command, self._folder, self.ended, policy=policy, final=final)

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    async def inject_faults(self, faults: Sequence[Fault]) -> None:
        """Let the faults happen at their times, from now on; returns when the last one is over."""
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for fault in faults:
                await anyio.sleep_until(began + fault.at_seconds)
                tasks.start_soon(self._inject_server_fault if fault.role == "server" else self._inject, fault)

    def write_history(self) -> None:
        """What struck and what ended, for whoever looks into the folder."""
        history = {"injected": self.injected, "ended": self.ended}
        (self._folder / "history.json").write_bytes(msgspec.json.format(msgspec.json.encode(history)))

    async def find_survivors(self) -> list[str]:
        """What descends from the processes that have ended and has not noticed in time."""
        left: list[psutil.Process] = []
        with anyio.move_on_after(LEAVE_SECONDS):
            while left := [process for member in self.members for process in member.living_descendants()]:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        return [" ".join(process.cmdline()) for process in left if _is_running(process)]

    async def _inject(self, fault: Fault) -> None:
        members = [member for member in self.of(fault.role) if member.is_targetable and fault.policy in ("", member.policy)]
        if not members:
            self.skipped += 1
            return
        member = members[int(fault.pick * len(members))]
        member.paused = fault.kind == "pause"
        name = member.name
        held = await self._fetch_in_flight(member)
        if fault.role != "learner" and self._patience:
            with anyio.move_on_after(self._patience):
                await self.moment.wait()
        if member.process is None or member.name != name:
            member.paused = False
            self.skipped += 1
            return
        if fault.kind == "pause":
            await self._pause(member, fault, held)
        else:
            sign = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
            self._record(fault, name, member.send(sign, fault.seconds), held=held)

    async def _pause(self, member: Member, fault: Fault, held: tuple[str, ...]) -> None:
        name = member.name
        time_ns = member.send(signal.SIGSTOP)
        try:
            await anyio.sleep(fault.seconds)
        finally:
            member.paused = False
            back_ns = time.time_ns()
            if member.process is not None and member.name == name:
                member.process.send_signal(signal.SIGCONT)
        self._record(fault, name, time_ns, back_ns=back_ns, held=held)

    async def _inject_server_fault(self, fault: Fault) -> None:
        time_ns = time.time_ns()
        if fault.kind == "pause":
            process = psutil.Process(self._server.pid)
            process.suspend()
            try:
                await anyio.sleep(fault.seconds)
            finally:
                process.resume()
        else:
            await (self._server.kill() if fault.kind == "kill" else self._server.stop())
            await anyio.sleep(fault.seconds)
            await self._server.restart()
        alive = tuple(member.name for member in self.members if member.is_targetable)
        self._record(fault, "server", time_ns, back_ns=time.time_ns(), alive=alive)

    def _record(self, fault: Fault, name: str, time_ns: int, **more: object) -> None:
        self.injected.append(InjectedFault(role=fault.role, kind=fault.kind, name=name, time_ns=time_ns, **more))  # type: ignore[arg-type]

    async def _fetch_in_flight(self, member: Member) -> tuple[str, ...]:
        """What the worker says to hold; nothing if it does not answer, as one that is just starting."""
        if member.role == "learner":
            return ()
        subject = self._subjects.control(member.role, member.name, "ping")
        try:
            answer = await self._bus.request(subject, encode(ControlRequested(command="ping")), timeout=PING_SECONDS)
            return decode(ControlAnswered, answer, subject=subject).busy_with
        except (BusError, MalformedMessage):
            return ()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def open_run_folder(keep: str | None) -> AsyncIterator[Path]:
    """A folder for stores and logs, gone at the end unless one is named."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fleetbus-chaos-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
    else:
        Path(keep).mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
        yield Path(keep)
