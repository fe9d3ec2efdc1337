"""The world of one seed: server, deployment, faults and checkers, from the first request until all workers ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import trio.lowlevel
from anyio.abc import TaskGroup

from fleetbus.audit.run import enter
from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit import training as audit_training
from fleetbus.core.audit import versions as audit_limits
from fleetbus.core.audit.books import Audit
from fleetbus.log.archive_format import ArchiveDamaged, list_segments
from fleetbus.log.archive_reader import read_archive
from tests.simulation.deployment.endings import CLIENTS
from tests.simulation.deployment.fixtures import build_fixtures
from tests.simulation.deployment.workers import Deployment
from tests.simulation.faults.fault_schedule import FaultInjector
from tests.simulation.faults.late_copies import LateCopies
from tests.simulation.faults.log_operator import LogOperator
from tests.simulation.faults.power_loss import PowerSupply
from tests.simulation.judge.bounds_checker import BoundsChecker
from tests.simulation.judge.forgeries import check_forgeries
from tests.simulation.judge.liveness_checker import LivenessChecker
from tests.simulation.observer import Observer
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import ROOMY_LOG_BYTES, Scenario

MOST_TIMES = 10
"""How many times as many episodes as a calm run requests are too many: something is asked for again and again then."""

FEWEST_EPISODES = 100
"""A calm run is taken to request at least so many."""

LEAVE_SECONDS = 90.0
"""A drained worker is gone by then: its drain limit, stages that hang, unanswered last words."""


class World:
    """One run of one scenario; `run` returns when everything has ended, or at the first violation."""

    def __init__(self, scenario: Scenario, observer: Observer, folder: Path) -> None:
        self._fixtures = build_fixtures(scenario, observer, folder)
        self._observer = observer
        self._oracle = self._fixtures.oracle
        self.log_checker = self._fixtures.log_checker
        self._liveness = LivenessChecker(observer, self.log_checker, self._oracle)
        self.bounds = BoundsChecker(observer, self._fixtures.configuration, scenario.pace.most_entries)

    @property
    def processes(self) -> tuple[Process, ...]:
        """All that there ever were."""
        return tuple(self._oracle.processes.values())

    async def run(self) -> None:
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        async with anyio.create_task_group() as group:
            group.start_soon(self._stop_on_violation, group)
            async with anyio.create_task_group() as living:
                fleet = Deployment(self._fixtures, living)
                living.start_soon(self._check_periodically)
                living.start_soon(self._fixtures.network_faults.run)
                living.start_soon(self._heal)
                if self._fixtures.scenario.log_bytes != ROOMY_LOG_BYTES:
                    living.start_soon(LogOperator(self._fixtures).run)
                if self._fixtures.scenario.late_copies:
                    living.start_soon(LateCopies(self._fixtures).run)
                if self._fixtures.scenario.power_losses:
                    living.start_soon(PowerSupply(self._fixtures, fleet).run)
                fleet.start_all()
                await self._run_until_finished(fleet, living)
                await self._drain_all(fleet)
                living.cancel_scope.cancel()
            group.cancel_scope.cancel()
        self._check_leftovers(tasks_before)

    async def _run_until_finished(self, fleet: Deployment, group: TaskGroup) -> None:
        """Until the training is finished and no request lacks its outcome."""
        group.start_soon(FaultInjector(self._fixtures, fleet).run, self._fixtures.scenario.fault_schedule)
        pace = self._fixtures.scenario.pace
        with anyio.move_on_after(pace.horizon_seconds) as horizon:
            await fleet.training_finished.wait()
            self._observer.trace("training finished")
            while self._list_missed():
                await self.log_checker.episodes.one_finished()
            await anyio.sleep_until(pace.lasts_seconds)
        left = self._list_missed()
        if horizon.cancelled_caught and (left or not fleet.training_finished.is_set()):
            steps = ", ".join(str(training.steps) for training in self.log_checker.trainings.values())
            detail = f"{steps} steps; open: {', '.join(left[:4]) or 'none'}"
            self._observer.violate("the training comes to its end", detail)

    def _list_missed(self) -> list[str]:
        """Requests without an outcome. One whose result the log lost may stay so if no learner waits for it any more: who
        played it acked it, and lived on, or the learner had read it, lived on, and settled it."""
        training, has_lost = self.log_checker.training, self._observer.judged is not None
        unawaited = training.strays | training.settled.keys() if has_lost else ()
        return [
            episode
            for episode, record in self.log_checker.episodes.open.items()
            if not (episode in unawaited or (has_lost and training.is_abandoned(record)))
        ]

    async def _drain_all(self, fleet: Deployment) -> None:
        """Drain all workers and wait for their end."""
        fleet.is_closing = True
        started = anyio.current_time()
        for process in self._oracle.processes.values():
            if process.role in CLIENTS:
                process.abort()
            elif process.is_alive:
                process.stop()
        for process in self._oracle.processes.values():
            with anyio.move_on_after(max(started + LEAVE_SECONDS - anyio.current_time(), 0.001)):
                await process.ended.wait()
            if not process.ended.is_set():
                self._observer.violate("a drained worker leaves", process.name)

    async def _heal(self) -> None:
        """From a scenario's moment on nothing more goes wrong."""
        if math.isfinite(self._fixtures.scenario.heals_at):
            await anyio.sleep_until(self._fixtures.scenario.heals_at)
            self._fixtures.network_faults.heal()
            self._observer.has_healed = True
            self._observer.trace("healed")

    async def _check_periodically(self) -> None:
        """Periodic checks for events that are missing."""
        while True:
            await anyio.sleep(self._fixtures.scenario.pace.check_seconds)
            self.log_checker.check_open()
            self.bounds.check(self._fixtures.log.count)
            self._oracle.check_superseded()
            self._oracle.check_versions()
            for training in self.log_checker.trainings.values():
                self._oracle.check_replaced(training.replaced)
                training.check_content(lambda sequence: self._fixtures.log.get(sequence) is not None)
            self._liveness.check()
            count, scenario = len(self.log_checker.episodes.record), self._fixtures.scenario
            calm = max(scenario.steps * scenario.groups * scenario.group_size, FEWEST_EPISODES)
            self._observer.require(count < MOST_TIMES * calm, "the training makes progress", f"{count} episodes requested")
            for process in self._oracle.processes.values():
                overdue = process.drained_at and anyio.current_time() - process.drained_at > LEAVE_SECONDS
                if overdue and not process.ended.is_set() and process.ending != "crashed":
                    self._observer.violate("a drained worker leaves", process.name)

    async def _stop_on_violation(self, group: TaskGroup) -> None:
        await self._observer.violated.wait()
        for process in self._oracle.processes.values():
            process.abort()
        group.cancel_scope.cancel()

    def _check_leftovers(self, tasks_before: int) -> None:
        if self._observer.violations:
            return
        self._oracle.check_environments()
        self.log_checker.sessions.check_environments()
        for training in self.log_checker.trainings.values():
            training.check_settled()
        self._check_audit()
        self._check_archive()
        check_forgeries(self._observer, self.log_checker.entries, self._fixtures.scenario.seed)
        left = trio.lowlevel.current_statistics().tasks_living - tasks_before
        self._observer.require(left == 0, "no task is left behind", f"{left} tasks")

    def _check_audit(self) -> None:
        """The same books as `fleetbus audit` keeps."""
        audit = _keep_books(self.log_checker.entries)
        report = audit.report()
        for finding in report.findings:
            self._observer.violate("the audit balances", f"{finding.kind}: {finding.meaning}: {', '.join(finding.ids[:4])}")
        episodes = self.log_checker.episodes
        kept = sum(
            len(record.request.trained_policies)
            for record in episodes.record.values()
            if record.request_sequence >= episodes.floor.sequence
        )
        self._observer.require(len(audit) <= kept, "an audit forgets what the floor has passed", f"{len(audit)} of {kept}")
        with _tiny_audit():
            same = _keep_books(self.log_checker.entries).report() == report
        is_cut = report.books.void > 0  # no lineage goes back by as many steps as an audit tells apart; here one would
        self._observer.require(
            (same or is_cut) and not audit.missing, "an audit that forgets old steps keeps the same books", ""
        )
        at_work = report.attempts.in_flight
        self._observer.require(at_work == 0, "every attempt is finished or superseded", f"{at_work} are not")

    def _check_archive(self) -> None:
        """What was trimmed is in the archive, and what is in the archive is what was stored."""
        fixtures = self._fixtures
        with_entries = [archive for archive in fixtures.archives if list_segments(archive)]  # none: nothing was trimmed
        try:
            archived = {entry.sequence: entry for archive in with_entries for entry in read_archive(archive)}
        except ArchiveDamaged as damaged:
            where = str(damaged).removeprefix(f"{fixtures.folder}/")  # another one in each run, and the trace is to be the same
            self._observer.violate("every entry is in the log or in the archive", where)
            return
        for entry in self.log_checker.entries:
            held = (fixtures.log.get(entry.sequence), archived.get(entry.sequence))
            right = any(held) and all(each in (None, entry) for each in held)
            self._observer.require(right, "every entry is in the log or in the archive", f"{entry.sequence} {entry.subject}")


def _keep_books(entries: Iterable[StreamEntry]) -> Audit:
    audit = Audit()
    for entry in entries:
        enter(audit, entry)
    return audit


@contextmanager
def _tiny_audit() -> Iterator[None]:
    """Limits of the audit's memory that no simulated run would reach otherwise."""
    before = audit_limits.MAX_VERSIONS, audit_training.MAX_SETTLEMENTS
    audit_limits.MAX_VERSIONS = audit_training.MAX_SETTLEMENTS = 1
    try:
        yield
    finally:
        audit_limits.MAX_VERSIONS, audit_training.MAX_SETTLEMENTS = before
