"""The processes of a run: started together, restarted when they crash, stopped in order within a bounded time.

Above it is `fleetbus_workers.up.run`, below it `ChildProcess`. It knows nothing of NATS or of what the processes do, except
that the job is finished when all final processes have exited 0, that another one that does was drained or replaced, and that
status 2 of one that never worked means that trying again is of no use.
"""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import groupby
from pathlib import Path
from typing import Protocol

import anyio
import anyio.lowlevel

from fleetbus.errors import FleetbusError
from fleetbus_workers.command.exit_status import FINISHED, REFUSED
from fleetbus_workers.up.process import tail
from fleetbus_workers.up.restarts import RestartBudget, describe_failure, name_start


class WorkerUnrecoverable(FleetbusError):
    """A worker crashed too often, or cannot work as it is configured. ``reason`` says which, where that is no refusal of its
    own; ``tail`` are the last lines of its log."""

    def __init__(self, name: str, status: int, lines: Sequence[str], reason: str = "") -> None:
        super().__init__(f"{name} ended with status {status} and was given up{f' after {reason}' if reason else ''}")
        self.name = name
        self.tail = list(lines)


class Child(Protocol):
    """A started `Plan`."""

    @property
    def has_exited(self) -> bool:
        """True if it has ended, though what it started may not have."""

    async def wait(self) -> int:
        """Its exit status, negative for a signal."""

    def terminate(self) -> None:
        """Ask it to drain."""

    def kill(self) -> None:
        """End it now."""


class Plan(Protocol):
    """A thing that is kept running: a process (`ProcessPlan`), or a worker in this process."""

    @property
    def name(self) -> str: ...

    @property
    def stop_limit_seconds(self) -> float:
        """Counted from the moment when everything begins to stop; those with a smaller limit stop first."""

    @property
    def log(self) -> Path: ...

    @property
    def output(self) -> Sequence[Path]:
        """Folders into which it writes what must be whole, such as checkpoints."""

    def start(self, number: int) -> AbstractAsyncContextManager[Child]:
        """Its ``number``-th start, 0 first; leaving the block ends it."""


Report = Callable[[str], None]

Achieved = Callable[[str], float]
"""How much a worker, by the name of its plan, has achieved in all its starts (`fleetbus_workers.up.restarts`)."""

Prepare = Callable[[], Awaitable[object]]
"""Called before a plan is started again; it raises nothing and takes seconds at most."""

WRITING_SECONDS = 10.0
"""Whoever was writing when the stop limit ended continues until nothing has grown for this long: a checkpoint of some gigabytes
takes longer than any fixed limit, and is synced and hashed at its end."""


def _compute_stop_limit(plan: Plan) -> float:
    return plan.stop_limit_seconds


def _measure_output(folders: Sequence[Path]) -> dict[str, int]:
    """Sizes of all files below the folders."""
    found = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # it was renamed or removed just now
                    found[os.path.join(place, name)] = os.stat(os.path.join(place, name)).st_size
    return found


class Supervisor:
    """Runs plans. ``report`` gets one line per event that a person should know of."""

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        final: Sequence[str],
        report: Report,
        achieved: Achieved,
        prepare: Prepare = anyio.lowlevel.checkpoint,
    ) -> None:
        self._achieved = achieved
        self._prepare = prepare
        self._plans = plans
        self._final = frozenset(final)
        self._finished: set[str] = set()
        self._report = report
        self._children: dict[str, Child] = {}
        self._starts: dict[str, str] = {}
        """The names of the plans by those of the workers that run: each start of a plan has a name of its own."""
        self._ended = {plan.name: anyio.Event() for plan in plans}
        self._stopping = False
        self.over = anyio.Event()
        """Set when there is nothing to wait for: the processes named ``final`` have exited 0, or one was given up."""
        self.failure: WorkerUnrecoverable | None = None

    async def run(self) -> None:
        """Keep the processes running. Returns after `stop`; being cancelled kills them."""
        async with anyio.create_task_group() as tasks:
            for plan in self._plans:
                tasks.start_soon(self._keep_running, plan)

    async def stop(self) -> None:
        """SIGTERM in the order of their time limits, waiting for each until its limit, which begins then, and while it
        writes; then it is killed."""
        self._stopping = True
        for limit, same in groupby(sorted(self._plans, key=_compute_stop_limit), key=_compute_stop_limit):
            plans = list(same)
            names = [plan.name for plan in plans]
            written = {plan.name: _measure_output(plan.output) for plan in plans}
            for name in names:
                self._terminate(name)
            with anyio.move_on_after(limit):
                for name in names:
                    await self._ended[name].wait()
            for plan in plans:
                await self._wait_while_writing(plan, written[plan.name])
            self._kill_stragglers(names)

    def kill(self) -> None:
        """End everything at once."""
        self._stopping = True
        for child in self._children.values():
            child.kill()

    def replace_hung(self, role: str, worker: str) -> None:
        """Kill the process of a worker that is silent, so that it is started again; nothing if it is none of these, as one that
        crashed, or one that only has the name of a worker of another role."""
        name = self._starts.get(worker, "")
        if name.partition("-")[0] == role and not self._stopping and not self._children[name].has_exited:
            self._report(f"{worker} hangs, and is killed: what it was at is done again")
            self._children[name].kill()

    def _terminate(self, name: str) -> None:
        if name in self._children:
            self._children[name].terminate()
        else:
            self._ended[name].set()

    async def _wait_while_writing(self, plan: Plan, before: object) -> None:
        """Return when the process has ended, or has written nothing: since ``before``, then for `WRITING_SECONDS`."""
        ended = self._ended[plan.name]
        is_reported = False
        while not ended.is_set() and (now := _measure_output(plan.output)) != before:
            if not is_reported:
                self._report(f"{plan.name} is still writing; waiting until its files are complete")
                is_reported = True
            before = now
            with anyio.move_on_after(WRITING_SECONDS):
                await ended.wait()

    def _kill_stragglers(self, names: Sequence[str]) -> None:
        for name in names:
            if (child := self._children.get(name)) and not child.has_exited:
                self._report(f"{name} did not stop in time and was killed: what it was at is done again")
                child.kill()

    async def _keep_running(self, plan: Plan) -> None:
        budget = RestartBudget()
        starts = 0
        while not self._stopping:
            status = await self._run_once(plan, starts)
            if self._stopping or self._is_finished(plan, status):
                break
            if status == FINISHED:
                self._report(f"{plan.name} has stopped as it was asked to, and is not started again")
                break
            if status == REFUSED:
                delay, reason = budget.delay_after_refusal(anyio.current_time(), has_worked=starts > 0), ""
            else:
                delay, reason = budget.delay_after_crash(self._achieved(plan.name)), describe_failure(plan.name)
            if delay is None:
                self._record_failure(WorkerUnrecoverable(plan.name, status, tail(plan.log), reason))
                break
            self._report(f"{plan.name} ended with status {status}; starting it again in {delay:g} s (see {plan.log})")
            await anyio.sleep(delay)
            await self._prepare()
            starts += 1
        self._ended[plan.name].set()

    async def _run_once(self, plan: Plan, start: int) -> int:
        async with plan.start(start) as child:
            self._children[plan.name] = child
            worker = name_start(plan.name, start)
            self._starts[worker] = plan.name
            try:
                if self._stopping:  # `stop` did not know it, and will not wait for it: it has nothing to hand back yet
                    child.kill()
                return await child.wait()
            finally:
                del self._children[plan.name], self._starts[worker]

    def _is_finished(self, plan: Plan, status: int) -> bool:
        if plan.name not in self._final or status != FINISHED:
            return False
        self._finished.add(plan.name)
        if self._finished == self._final:
            self.over.set()
        return True

    def _record_failure(self, failure: WorkerUnrecoverable) -> None:
        """The others continue until `stop`, so that they can finish or hand back in order."""
        self.failure = self.failure or failure
        self.over.set()
