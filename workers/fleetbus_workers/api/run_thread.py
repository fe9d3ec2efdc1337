"""A run in a thread with an event loop of its own, so that nothing in the caller's program can delay its heartbeats.

Above it are `fleetbus.train` and `fleetbus.Run`, in any thread and event loop; below it the run of `fleetbus up`, which
listens to no signals here: the caller's program does.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import anyio

from fleetbus.bus.base import Bus
from fleetbus.concurrency.wakeup import ThreadWakeup
from fleetbus.config.run_folder import RunFolder
from fleetbus.config.settings import Configuration
from fleetbus.errors import RunFailed
from fleetbus.logs.setup import configure_logs_if_unset
from fleetbus_workers.api.arguments import RunArguments, write_tasks_file
from fleetbus_workers.api.environment_object import build_object_factory
from fleetbus_workers.api.events import Event, EventDisplay, EventLog
from fleetbus_workers.api.local_worker import build_environment_plan
from fleetbus_workers.assembly.environment_work import work_with
from fleetbus_workers.assembly.work import Work
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.command import (
    check_run,
    draw_chart_if_possible,
    format_opening_line,
    format_path,
    hold_run,
    load_finished_summary,
    record_start,
)
from fleetbus_workers.up.process_plans import LocalRoles, build_role_command
from fleetbus_workers.up.run import Run as UpRun
from fleetbus_workers.up.run import RunResult
from fleetbus_workers.up.summary_builder import Summary
from fleetbus_workers.up.summary_report import format_finished_report, format_report, write_summary
from fleetbus_workers.up.supervisor import WorkerUnrecoverable

MAIN_THREAD_CHECK_SECONDS = 0.25
"""How soon a run notices that the program ends without having stopped it."""


class RunThread:
    """One run. `start`, `request_stop`, `kill` and the events may be used from any thread."""

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        self.configuration: Configuration = arguments.loaded.configuration
        self.events = EventLog()
        self.summary: Summary | None = None
        self.failure: BaseException | None = None
        self._started: Future[None] = Future()
        self._requests: ThreadWakeup | None = ThreadWakeup()
        self._requests_lock = threading.Lock()
        self._stop_requested = False
        self._kill_requested = False
        self._thread = threading.Thread(target=self._main, name=f"fleetbus run {self.configuration.run.name}")

    def start(self) -> None:
        """Returns once everything is checked and the run is about to begin; raises `UserError` if it cannot."""
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.request_stop()
            raise

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def request_stop(self) -> None:
        """Stop in order: workers finish or release their work. A run that has ended ignores it."""
        self._stop_requested = True
        self._notify()

    def kill(self) -> None:
        """End everything at once."""
        self._kill_requested = True
        self._notify()

    def join(self) -> None:
        """Wait until everything has ended."""
        self._thread.join()

    def result(self) -> Summary:
        """The summary of a run that has ended; raises what it ended with otherwise."""
        if self.failure is not None:
            raise self.failure
        if self.summary is None:
            raise RunFailed(f"run {self.configuration.run.name} was stopped before it began")
        return self.summary

    def build_environment_work(self) -> Work | None:
        """The work of an environment worker, None if the settings name it."""
        if self.arguments.factory is None:
            return None
        factory, configuration = self.arguments.factory, self.configuration

        async def work(bus: Bus, settings: Configuration, name: str, drain: anyio.Event) -> None:
            await work_with(build_object_factory(factory, configuration), bus, settings, name, drain)

        return work

    def _notify(self) -> None:
        with self._requests_lock:
            if self._requests is not None:
                self._requests.notify()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.failure = error
        finally:
            if not self._started.done():
                self._started.set_exception(self.failure or RunFailed("the run ended before it began"))
            with self._requests_lock:
                assert self._requests is not None
                self._requests.close()
                self._requests = None
            self.events.close()

    def _run(self) -> None:
        arguments = self.arguments
        with write_tasks_file(arguments):
            configuration, folder = check_run(arguments.loaded, local_environment=arguments.factory is not None)
        self.configuration = configuration
        self.summary = load_finished_summary(configuration, folder)
        if self.summary is not None:
            self._started.set_result(None)
            self._say(format_finished_report(self.summary, folder, format_path, commands=False))
            return
        with hold_run(configuration, folder), configure_logs_if_unset(configuration.log):
            self._started.set_result(None)
            result = anyio.run(self._serve, configuration, folder)  # asyncio: its child processes work in any thread
            self._finish(result, configuration, folder)

    def _finish(self, result: RunResult, configuration: Configuration, folder: RunFolder) -> None:
        self.summary = result.summary
        if result.summary is not None:
            write_summary(result.summary, folder.summary)
            draw_chart_if_possible(result.summary, folder)
            self._say(format_report(result.summary, folder, format_path, commands=False))
        if result.failure is not None:
            lines = result.failure.tail if isinstance(result.failure, WorkerUnrecoverable) else ()
            raise RunFailed(f"{result.failure}; its log is in {format_path(folder.logs)}", lines) from result.failure

    async def _serve(self, configuration: Configuration, folder: RunFolder) -> RunResult:
        progress = Progress(configuration.learner.steps)
        display = EventDisplay(progress, self.events.append)
        display.line(format_opening_line(configuration, folder))
        run = UpRun(
            configuration,
            folder,
            command=build_role_command(folder.configuration),
            record_start=partial(record_start, configuration, folder),
            display=display,
            local=self._build_local_roles(configuration, folder),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_requests, run)
            tasks.start_soon(self._stop_with_program)
            result = await run.run(progress, handle_signals=False)
            tasks.cancel_scope.cancel()
        return result

    def _build_local_roles(self, configuration: Configuration, folder: RunFolder) -> LocalRoles:
        if self.arguments.factory is None:
            return {}
        make_factory = partial(build_object_factory, self.arguments.factory, configuration)
        return {"environment": partial(build_environment_plan, make_factory, configuration, folder.logs)}

    async def _follow_requests(self, run: UpRun) -> None:
        requests = self._requests
        assert requests is not None
        while True:
            if self._stop_requested:
                run.request_stop()
            if self._kill_requested:
                run.kill()
            await requests.wait()

    async def _stop_with_program(self) -> None:
        """A program that ends without leaving its run in order would wait for this thread for ever."""
        while threading.main_thread().is_alive():  # noqa: ASYNC110  # a thread's end wakes no event loop
            await anyio.sleep(MAIN_THREAD_CHECK_SECONDS)
        self.request_stop()

    def _say(self, lines: list[str]) -> None:
        steps = self.configuration.learner.steps
        step = max(self.summary.steps, default=0) if self.summary is not None else 0
        for line in lines:
            self.events.append(Event(kind="message", text=line, step=step, steps=steps))
