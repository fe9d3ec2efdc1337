"""`fleetbus up`: one run on this machine, from the checks to the report.

Above it is the command; below it a `Fleet` with the roles, a `Fleet` with the server, and a bus to watch the log through.
Nothing is started before `fleetbus_workers.up.checks` has passed, and nothing is left running when this returns.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import structlog

from fleetbus.auth.access import access_for
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.config.run_folder import RunFolder
from fleetbus.config.settings import Configuration
from fleetbus.errors import BusError, FleetbusError
from fleetbus_schemas import Subjects
from fleetbus_workers.overview.progress import Progress
from fleetbus_workers.up.book import Summary
from fleetbus_workers.up.display import Display
from fleetbus_workers.up.fleet import Fleet
from fleetbus_workers.up.follow import Follower
from fleetbus_workers.up.plans import RoleCommand, role_plans, server_plan, stream_plan
from fleetbus_workers.up.server import end_stray_server

SUMMARY_SECONDS = 8.0
HASTY_SUMMARY_SECONDS = 1.5
"""For reading the rest of the log: after the run's own end, and where somebody waits for it to stop or the server is gone. Most
of it was read while the run went on."""

STRAY_SECONDS = 6.0
"""For a server that its holder left behind; there is hardly ever one."""

log = structlog.get_logger()


class Ending(msgspec.Struct, kw_only=True):
    """How a run ended: finished unless a signal or a failure says otherwise."""

    signal: signal.Signals | None = None
    failure: FleetbusError | None = None
    summary: Summary | None = None


class Run:
    """One run of everything. ``command`` makes the command lines of the roles."""

    def __init__(self, configuration: Configuration, folder: RunFolder, *, command: RoleCommand, display: Display) -> None:
        self._configuration = configuration
        self._folder = folder
        self._command = command
        self._display = display
        self._ending = Ending()
        self._asked_to_stop = anyio.Event()
        self._starting = anyio.CancelScope()
        self._roles: Fleet | None = None
        self._server = Fleet(
            [server_plan(folder, self._port, os.environ, configuration.nats.auth)], final="", report=display.line
        )

    async def run(self, progress: Progress) -> Ending:
        """Start, watch, stop; returns within 10 s of the first signal, at once after the second."""
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._obey_signals, tasks.cancel_scope)
            async with self._running_server() as url:
                if url:
                    await self._train(url, progress, began)
            tasks.cancel_scope.cancel()
        return self._ending

    async def _obey_signals(self, everything: anyio.CancelScope) -> None:
        """First: stop in order. Second: end everything at once."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for received in signals:
                if self._ending.signal is not None:
                    self._kill_all()
                    everything.cancel()
                    return
                self._ending.signal = received
                self._display.line("stopping: workers finish or hand back what they have (Ctrl-C again ends them at once)")
                self._asked_to_stop.set()
                self._starting.cancel()

    def _kill_all(self) -> None:
        if self._roles is not None:
            self._roles.kill()
        self._server.kill()

    @asynccontextmanager
    async def _running_server(self) -> AsyncIterator[str]:
        """The URL of the server to use; empty if none could be started."""
        if self._configuration.nats.url:
            yield self._configuration.nats.url
            return
        self._folder.server.unlink(missing_ok=True)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._server.run)
                with self._starting:
                    await self._until_server_is_told()
                yield self._told_url()
                await self._server.stop()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(STRAY_SECONDS, shield=True):
                await end_stray_server(self._folder.store)
            self._folder.server.unlink(missing_ok=True)
        self._ending.failure = self._ending.failure or self._server.failure

    async def _until_server_is_told(self) -> None:
        while not self._folder.server.exists() and not self._server.over.is_set():  # noqa: ASYNC110  # another process writes it
            await anyio.sleep(0.02)
        if self._folder.server.exists():
            self._folder.port.write_text(str(_address(self._folder.server)[1]))

    def _told_url(self) -> str:
        return _address(self._folder.server)[0] if self._ready_to_train() else ""

    def _ready_to_train(self) -> bool:
        return not self._asked_to_stop.is_set() and self._folder.server.exists()

    def _port(self) -> int:
        """The configured port, or the one that the server had before it was started again, in an earlier `up` too: who looks
        at the run, or works for it, goes on there."""
        if self._folder.server.exists():
            return _address(self._folder.server)[1]
        return self._configuration.nats.port or _port_if_free(self._folder.port)

    async def _train(self, url: str, progress: Progress, began: float) -> None:
        run = self._configuration.run
        access = access_for("up", self._configuration.nats.auth)
        async with connect(url, run=run.name, role="up", worker=f"up-{os.getpid()}", **access) as bus:
            with anyio.CancelScope() as self._starting:
                if self._asked_to_stop.is_set():
                    return
                await bus.declare(stream_plan(self._configuration))
                self._roles = self._fleet(url)
            if self._roles is not None and not self._starting.cancelled_caught:
                await self._watch(bus, self._roles, progress, began)

    def _fleet(self, url: str) -> Fleet:
        plans = role_plans(self._configuration, self._folder, url, os.environ, self._command)
        return Fleet(plans, final="learner", report=self._display.line)

    async def _watch(self, bus: Bus, roles: Fleet, progress: Progress, began: float) -> None:
        run = self._configuration.run
        follower = Follower(bus, Subjects(run.name), run.policy, progress, self._display)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show, follower)
            tasks.start_soon(roles.run)
            await _first(roles.over, self._server.over, self._asked_to_stop)
            await roles.stop()
            tasks.cancel_scope.cancel()
        self._ending.failure = roles.failure or self._server.failure
        await self._read_the_rest(follower)
        summary = follower.book.summary(run=run.name, seed=run.seed, wall_seconds=anyio.current_time() - began)
        found = progress.signal.latest
        self._ending.summary = msgspec.structs.replace(summary, signal=found.reason if found is not None else "")

    async def _show(self, follower: Follower) -> None:
        """Watching is a convenience: training goes on without it."""
        try:
            await follower.run()
        except* BusError as errors:
            self._display.line(f"progress is shown no more: {errors.exceptions[0]}")

    async def _read_the_rest(self, follower: Follower) -> None:
        in_haste = self._asked_to_stop.is_set() or self._server.over.is_set()
        seconds = HASTY_SUMMARY_SECONDS if in_haste else SUMMARY_SECONDS
        try:
            with anyio.fail_after(seconds):
                await follower.finish()
        except (TimeoutError, BusError) as error:
            log.warning("the summary is incomplete", reason=str(error) or f"no answer within {seconds:g} s")


async def _first(*events: anyio.Event) -> None:
    """Wait until one of them is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def _port_if_free(file: Path) -> int:
    """The port that the file names if nobody has it by now; else 0, which is any."""
    try:
        port = int(file.read_text())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def _address(file: Path) -> tuple[str, int]:
    """URL and port of the run's own server."""
    url = str(msgspec.json.decode(file.read_bytes())["url"])
    return url, int(url.rpartition(":")[2])
