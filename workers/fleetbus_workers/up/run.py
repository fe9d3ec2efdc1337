"""`fleetbus up`: one run on this machine, from the checks to the report.

Above it is the command; below it a `Supervisor` with the roles, a `Supervisor` with the server, and a bus to watch the log
through.
Nothing is started before `fleetbus_workers.up.checks` has passed, and nothing is left running when this returns.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.config.run_folder import RunFolder
from fleetbus.config.seats import list_joined_policies
from fleetbus.config.settings import Configuration
from fleetbus.errors import BusError, FleetbusError, RunFailed, UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.command.noted_operations import store_notes
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.address import read_address
from fleetbus_workers.up.display import Display
from fleetbus_workers.up.log_follower import Follower
from fleetbus_workers.up.placement import find_gpus, place_roles
from fleetbus_workers.up.process_plans import LocalRoles, RoleCommand, build_role_plans, build_server_plan, build_stream_plan
from fleetbus_workers.up.progress_guard import ProgressGuard
from fleetbus_workers.up.restarts import Achievements, is_start_of
from fleetbus_workers.up.seat_workers import name_learner
from fleetbus_workers.up.server import end_stray_server
from fleetbus_workers.up.summary_builder import Summary, build_summary, is_summarized
from fleetbus_workers.up.supervisor import Supervisor

SUMMARY_SECONDS = 8.0
SHORT_SUMMARY_SECONDS = 1.5
"""For reading the rest of the log: after the run's own end, and when the user asked to stop or the server is gone. Most
of it was read while the run went on."""

GUARD_SECONDS = 0.5
"""Between two looks at what failed."""

STRAY_SECONDS = 6.0
"""Time limit for stopping an orphaned server; rarely needed."""

DECLARE_SECONDS = 5.0
"""For declaring the run's streams again; while the server is away that fails."""

PAGE_STOP_SECONDS = 2.0
"""For answers that the run's page is in the middle of."""

ServePage = Callable[[Configuration, Callable[[str], None], anyio.Event], Coroutine[Any, Any, None]]
"""Serves a page about the run until the event is set, and shows its address."""

log = structlog.get_logger()


class RunResult(msgspec.Struct, kw_only=True):
    """The end of a run: finished unless a signal or a failure says otherwise."""

    signal: signal.Signals | None = None
    failure: FleetbusError | None = None
    summary: Summary | None = None


class Run:
    """One run of everything. ``command`` makes the command lines of the roles; ``local`` are those that run in this process.
    ``record_start`` is called once the server has accepted the run, before any role is started; ``page`` then, too.

    `request_stop` and `kill` are for a run that does not listen to signals; they are called in its event loop."""

    def __init__(
        self,
        configuration: Configuration,
        folder: RunFolder,
        *,
        command: RoleCommand,
        record_start: Callable[[], None],
        display: Display,
        local: LocalRoles | None = None,
        page: ServePage | None = None,
    ) -> None:
        self._page = page
        self._configuration = configuration
        self._folder = folder
        self._command = command
        self._record_start = record_start
        self._local = local
        self._scope = anyio.CancelScope()
        self._display = display
        self._result = RunResult()
        self._stop_requested = anyio.Event()
        self._starting = anyio.CancelScope()
        self._roles: Supervisor | None = None
        self._achievements = Achievements()
        self._server = Supervisor(
            [build_server_plan(folder, self._choose_port, os.environ, configuration.nats.auth, configuration.nats.sync)],
            final=(),
            report=display.line,
            achieved=self._achievements.count,
        )

    async def run(self, progress: Progress, *, handle_signals: bool = True) -> RunResult:
        """Start, watch, stop; returns within 16 s of the first signal, later only while the learner writes, at once
        after the second."""
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            if handle_signals:
                tasks.start_soon(self._stop_on_signals)
            async with self._run_server() as url:
                if url:
                    await self._train(url, progress, began)
            tasks.cancel_scope.cancel()
        return self._result

    def request_stop(self, hint: str = "") -> None:
        """Stop in order."""
        if not self._stop_requested.is_set():
            self._display.line(f"stopping: workers finish or release their work{hint}")
            self._stop_requested.set()
            self._starting.cancel()

    def kill(self) -> None:
        """End everything at once."""
        if self._roles is not None:
            self._roles.kill()
        self._server.kill()
        self._scope.cancel()

    async def _stop_on_signals(self) -> None:
        """First: stop in order. Second: end everything at once."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for received in signals:
                if self._result.signal is not None:
                    self.kill()
                    return
                self._result.signal = received
                self.request_stop(" (press Ctrl-C again to kill them)")

    @asynccontextmanager
    async def _run_server(self) -> AsyncIterator[str]:
        """The URL of the server to use; empty if none could be started."""
        if self._configuration.nats.url:
            yield self._configuration.nats.url
            return
        self._folder.server.unlink(missing_ok=True)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._server.run)
                with self._starting:
                    await self._wait_for_server_address()
                yield self._read_url_if_ready()
                await self._server.stop()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(STRAY_SECONDS, shield=True):
                await end_stray_server(self._folder.store)
            self._folder.server.unlink(missing_ok=True)
        self._result.failure = self._result.failure or self._server.failure

    async def _wait_for_server_address(self) -> None:
        while not self._folder.server.exists() and not self._server.over.is_set():  # noqa: ASYNC110  # another process writes it
            await anyio.sleep(0.02)
        if self._folder.server.exists():
            self._folder.port.write_text(str(_read_address(self._folder.server)[1]))

    def _read_url_if_ready(self) -> str:
        return _read_address(self._folder.server)[0] if self._is_ready_to_train() else ""

    def _is_ready_to_train(self) -> bool:
        return not self._stop_requested.is_set() and self._folder.server.exists()

    def _choose_port(self) -> int:
        """The configured port, or the one that the server had before it was started again, in an earlier `up` too: who looks
        at the run, or works for it, continues there."""
        if self._folder.server.exists():
            return _read_address(self._folder.server)[1]
        return self._configuration.nats.port or find_free_port(self._folder.port)

    async def _train(self, url: str, progress: Progress, began: float) -> None:
        run = self._configuration.run
        access = build_access("up", self._configuration.nats.auth, run.name)
        async with connect(url, run=run.name, role="up", worker=f"up-{os.getpid()}", **access) as bus:
            with anyio.CancelScope() as self._starting:
                if self._stop_requested.is_set():
                    return
                await bus.declare(build_stream_plan(self._configuration))
                await store_notes(bus, self._configuration)
                self._record_start()
                self._roles = self._build_supervisor(url, bus)
            if self._roles is not None and not self._starting.cancelled_caught:
                await self._watch(bus, self._roles, progress, began)

    def _build_supervisor(self, url: str, bus: Bus) -> Supervisor:
        placement = place_roles(self._configuration, find_gpus(os.environ))
        if described := placement.describe():
            self._display.line(described)
        plans = build_role_plans(self._configuration, self._folder, url, os.environ, self._command, self._local, placement)
        self._achievements.workers = tuple(plan.name for plan in plans)
        return Supervisor(
            plans,
            final=("learner", *map(name_learner, self._list_others())),
            report=self._display.line,
            achieved=self._achievements.count,
            prepare=partial(declare_again, bus, self._configuration),
        )

    async def _watch(self, bus: Bus, roles: Supervisor, progress: Progress, began: float) -> None:
        run = self._configuration.run
        others = self._list_others()
        progress.others = {policy: Progress(self._configuration.learner.steps, is_summarized) for policy in others}
        guard = ProgressGuard(self._configuration.limits, anyio.current_time(), learners=1 + len(others))
        follower = Follower(bus, Subjects(run.name), run.policy, progress, self._display, guard, self._achievements)
        stalled = anyio.Event()
        async with self._serve_page(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_progress, follower)
            tasks.start_soon(self._guard_progress, guard, roles, stalled)
            tasks.start_soon(roles.run)
            await _wait_for_first(roles.over, self._server.over, self._stop_requested, stalled)
            await roles.stop()
            tasks.cancel_scope.cancel()
        self._result.failure = self._result.failure or roles.failure or self._server.failure
        await self._read_remaining_entries(follower)
        self._result.failure = self._result.failure or self._find_takeover(progress)
        for line in guard.take_final_lines():
            self._display.line(line)
        summary = build_summary(progress, run=run.name, seed=run.seed, wall_seconds=anyio.current_time() - began)
        found = progress.signal.latest
        signal = {"signal": found.reason, "signal_kind": found.kind} if found is not None else {}
        self._result.summary = msgspec.structs.replace(summary, **signal)

    @asynccontextmanager
    async def _serve_page(self) -> AsyncIterator[None]:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            if self._page is not None:
                tasks.start_soon(self._page, self._configuration, self._display.line, stop)
            yield
            stop.set()
            tasks.cancel_scope.deadline = anyio.current_time() + PAGE_STOP_SECONDS

    async def _guard_progress(self, guard: ProgressGuard, roles: Supervisor, stalled: anyio.Event) -> None:
        """Say what fails, replace what hangs, and set ``stalled`` when the run cannot progress."""
        while not stalled.is_set():
            await anyio.sleep(GUARD_SECONDS)
            now = anyio.current_time()
            for line in guard.take_lines(now):
                self._display.line(line)
            for role, worker in guard.take_hung(now):
                roles.replace_hung(role, worker)
            self._result.failure = guard.find_stall(now)
            if self._result.failure is not None:
                stalled.set()

    def _find_takeover(self, progress: Progress) -> FleetbusError | None:
        """A learner of somebody else's that took over from the one of this run, which ended as if it were done."""
        steps = self._configuration.learner.steps
        by_name = {"learner": progress} | {name_learner(policy): other for policy, other in progress.others.items()}
        for name, followed in by_name.items():
            learner = followed.training.newest_learner
            is_own = not learner or is_start_of(name, learner)
            if not (self._stop_requested.is_set() or is_own or followed.training.is_finished):
                return RunFailed(
                    f"{learner} has taken over the training at step {followed.step} of {steps}, and goes on with it"
                )
        return None

    def _list_others(self) -> list[str]:
        """The policies of seats that learners of their own train."""
        return list(list_joined_policies(self._configuration.run))

    async def _follow_progress(self, follower: Follower) -> None:
        """Progress display is optional: training continues without it."""
        try:
            await follower.run()
        except* BusError as errors:
            self._display.line(f"progress display stopped: {errors.exceptions[0]}")

    async def _read_remaining_entries(self, follower: Follower) -> None:
        is_urgent = self._stop_requested.is_set() or self._server.over.is_set()
        seconds = SHORT_SUMMARY_SECONDS if is_urgent else SUMMARY_SECONDS
        try:
            with anyio.fail_after(seconds):
                await follower.finish()
        except (TimeoutError, BusError) as error:
            log.warning(
                "summary is incomplete; continuing without the last entries",
                reason=str(error) or f"no answer within {seconds:g} s",
            )


async def declare_again(bus: Bus, configuration: Configuration) -> None:
    """A worker may have ended because somebody removed the consumer that it works from. A log that is gone stays gone."""
    try:
        with anyio.fail_after(DECLARE_SECONDS):
            await bus.log_state()
            await bus.declare(build_stream_plan(configuration))
    except (TimeoutError, BusError, UserError) as error:
        log.warning("streams could not be declared again; continuing without it", reason=str(error))


async def _wait_for_first(*events: anyio.Event) -> None:
    """Wait until one of them is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def find_free_port(file: Path) -> int:
    """The port in the file if it is still free; otherwise 0 (any free port)."""
    try:
        port = int(file.read_text())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def _read_address(file: Path) -> tuple[str, int]:
    """URL and port of the run's own server. Raises `UserError`."""
    address = read_address(file)
    port = address.url.rpartition(":")[2] if address else ""
    if address is None or not port.isdecimal():
        raise UserError(f"{file} holds no address of a server: remove it, then repeat the command")
    return address.url, int(port)
