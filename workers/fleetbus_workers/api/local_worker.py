"""An environment worker in this process, kept running by a `Supervisor` as a child process is.

Above it is the run of a Python program whose environment is an object of its own; below it the worker.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import structlog

from fleetbus.config.settings import Configuration
from fleetbus.errors import TakenOver, find_leaf, is_bad_input, iterate_leaves
from fleetbus_workers.assembly.environment_work import work_with
from fleetbus_workers.assembly.work import serve_role
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, REFUSED
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.up.process_plans import DRAIN_SECONDS, STOP_LIMITS_SECONDS
from fleetbus_workers.up.restarts import name_start

log = structlog.get_logger()

LocalWork = Callable[[str, anyio.Event], Awaitable[None]]
"""Works under a name until finished or, once the event is set, drained."""


class LocalWorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is kept running; see `Plan` of the supervisor. A start after a failure has a new name and no leases."""

    name: str
    stop_limit_seconds: float
    log: Path
    work: LocalWork
    output: Sequence[Path] = ()

    def start(self, number: int) -> AbstractAsyncContextManager[LocalWorker]:
        return _start(self, name_start(self.name, number))


class LocalWorker:
    """A started plan, with the interface of a child process."""

    def __init__(self, plan: LocalWorkerPlan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._drain = anyio.Event()
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()
        self._status = -int(signal.SIGKILL)

    @property
    def has_exited(self) -> bool:
        """True if it has ended."""
        return self._ended.is_set()

    async def run(self) -> None:
        """Work; an exception becomes a status, with the reason in the log file of the plan."""
        try:
            with self._scope:
                self._status = await self._work()
        finally:
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._status

    def terminate(self) -> None:
        self._drain.set()

    def kill(self) -> None:
        self._scope.cancel()

    async def _work(self) -> int:
        try:
            await self._plan.work(self._name, self._drain)
        except Exception as error:  # noqa: BLE001 - supervised: it is started again, as a process would be
            if find_leaf(error, TakenOver) is not None:
                return FINISHED
            bad_input = is_bad_input(error)
            lines = [str(next(iterate_leaves(error)))] if bad_input else traceback.format_exception(error)
            with self._plan.log.open("a") as file:
                file.write("".join(lines).rstrip() + "\n")
            log.error("worker failed", worker=self._name, reason=str(next(iterate_leaves(error))))
            return REFUSED if bad_input else CRASHED
        return FINISHED


@asynccontextmanager
async def _start(plan: LocalWorkerPlan, name: str) -> AsyncIterator[LocalWorker]:
    worker = LocalWorker(plan, name)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        try:
            yield worker
        finally:
            worker.kill()


def build_environment_plan(
    make_factory: Callable[[], EnvironmentFactory], configuration: Configuration, logs: Path, name: str, url: str
) -> LocalWorkerPlan:
    """The plan of one environment worker that plays in objects of the caller's."""
    limits = msgspec.structs.replace(configuration.limits, drain=min(configuration.limits.drain, DRAIN_SECONDS))
    decided = msgspec.structs.replace(configuration, limits=limits)
    return LocalWorkerPlan(
        name=name,
        stop_limit_seconds=STOP_LIMITS_SECONDS["environment"],
        log=logs / f"{name}.log",
        work=partial(_work, make_factory, decided, url),
    )


async def _work(
    make_factory: Callable[[], EnvironmentFactory], configuration: Configuration, url: str, name: str, drain: anyio.Event
) -> None:
    await serve_role("environment", partial(work_with, make_factory()), configuration, name, url, drain)
