"""The world of one seed: server, fleet, faults and books, from the first request until nobody is left."""

from __future__ import annotations

from pathlib import Path

import anyio
import trio.lowlevel
from anyio.abc import TaskGroup

from fleetbus.archive import read_archive
from fleetbus.audit import enter
from fleetbus.core.audit import Audit
from fleetbus_workers.simulation.fleet import Fleet
from fleetbus_workers.simulation.ground import prepared
from fleetbus_workers.simulation.happenings import Happenings
from fleetbus_workers.simulation.scenario import Scenario
from fleetbus_workers.simulation.watch import Watch

HORIZON_SECONDS = 3600.0
CHECK_SECONDS = 5.0
MOST_EPISODES = 1000
"""Ten times what a calm run requests: with more, something is asked for again and again."""

LEAVE_SECONDS = 90.0
"""A drained worker is gone by then: its drain limit, stages that hang, unanswered last words."""


class World:
    """One run of one scenario; `run` returns when everything has ended, or at the first violation."""

    def __init__(self, scenario: Scenario, watch: Watch, folder: Path) -> None:
        self._ground = prepared(scenario, watch, folder)
        self._watch = watch
        self._judge = self._ground.judge
        self.books = self._ground.books

    async def run(self) -> None:
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_when_broken, group)
            async with anyio.create_task_group() as living:
                fleet = Fleet(self._ground, living)
                living.start_soon(self._look_around)
                fleet.start_all()
                await self._live(fleet, living)
                await self._close(fleet)
                living.cancel_scope.cancel()
            group.cancel_scope.cancel()
        self._check_leftovers(tasks_before)

    async def _live(self, fleet: Fleet, group: TaskGroup) -> None:
        """Until the training is finished and every request has an outcome."""
        group.start_soon(Happenings(self._ground, fleet).run, self._ground.scenario.happenings)
        with anyio.move_on_after(HORIZON_SECONDS) as horizon:
            await fleet.training_finished.wait()
            self._watch.trace("training finished")
            await self.books.episodes.all_finished()
        if horizon.cancelled_caught:
            left = ", ".join(list(self.books.episodes.open)[:4])
            self._watch.violate("the training comes to its end", f"{self.books.training.steps} steps; open: {left or 'none'}")

    async def _close(self, fleet: Fleet) -> None:
        """Everybody drains and is gone."""
        fleet.is_closing = True
        started = anyio.current_time()
        for process in self._judge.processes.values():
            if process.is_alive:
                process.stop()
        for process in self._judge.processes.values():
            with anyio.move_on_after(max(started + LEAVE_SECONDS - anyio.current_time(), 0.001)):
                await process.ended.wait()
            if not process.ended.is_set():
                self._watch.violate("a drained worker leaves", process.name)

    async def _look_around(self) -> None:
        """What no event would show: that something did not happen."""
        while True:
            await anyio.sleep(CHECK_SECONDS)
            self.books.check_open()
            self._judge.check_superseded()
            self._judge.check_versions()
            self._judge.check_replaced(self.books.training.replaced)
            count = len(self.books.episodes.pages)
            self._watch.require(count < MOST_EPISODES, "the training makes progress", f"{count} episodes requested")
            for process in self._judge.processes.values():
                overdue = process.drained_at and anyio.current_time() - process.drained_at > LEAVE_SECONDS
                if overdue and not process.ended.is_set() and process.ending != "crashed":
                    self._watch.violate("a drained worker leaves", process.name)

    async def _end_when_broken(self, group: TaskGroup) -> None:
        await self._watch.broken.wait()
        for process in self._judge.processes.values():
            process.abort()
        group.cancel_scope.cancel()

    def _check_leftovers(self, tasks_before: int) -> None:
        if self._watch.violations:
            return
        self._judge.check_environments()
        self._check_audit()
        self._check_archive()
        left = trio.lowlevel.current_statistics().tasks_living - tasks_before
        self._watch.require(left == 0, "no task is left behind", f"{left} tasks")

    def _check_audit(self) -> None:
        """The same books as `fleetbus audit` keeps."""
        audit = Audit()
        for entry in self.books.entries:
            enter(audit, entry)
        report = audit.report()
        for finding in report.findings:
            self._watch.violate("the audit balances", f"{finding.kind}: {finding.meaning}: {', '.join(finding.ids[:4])}")
        at_work = report.attempts.in_flight
        self._watch.require(at_work == 0, "every attempt is finished or superseded", f"{at_work} are not")

    def _check_archive(self) -> None:
        """What was trimmed is in the archive, and what is in the archive is what was stored."""
        ground = self._ground
        archived = {entry.sequence: entry for entry in read_archive(ground.archive)} if ground.scenario.recorder else {}
        for entry in self.books.entries:
            held = (ground.log.get(entry.sequence), archived.get(entry.sequence))
            right = any(held) and all(each in (None, entry) for each in held)
            self._watch.require(right, "every entry is in the log or in the archive", f"{entry.sequence} {entry.subject}")
