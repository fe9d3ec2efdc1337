"""A server that loses power, and with it what it acked and had not synced: its files as they were a while before.

All workers end with it, or live on until they notice it. What is judged then is what a run promises for that case: training
goes on from a checkpoint that the log still knows, no version is given and nothing is trained twice, and the audit names what
was lost.
"""

from __future__ import annotations

import math
from pathlib import Path

import anyio

from fleetbus.audit.run import audit_run
from fleetbus.bus.memory import Files, MemoryServer
from fleetbus.core.audit.findings import MAX_IDS
from fleetbus.log.archive_format import list_segments
from fleetbus.log.archive_reader import read_archive
from fleetbus_schemas import Subjects
from tests.simulation.deployment.configuration import plan_streams
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.deployment.workers import Deployment
from tests.simulation.platform.process import RUN
from tests.simulation.scenario.shape import PowerLoss

JUDGED = frozenset({
    "a checkpoint holds the last step",
    "a lineage begins at a stored checkpoint",
    "a lineage begins once",
    "a lineage follows the newest",
    "an episode is settled once in the surviving lineage",
    "no fault ends a worker",
    "no task is left behind",
    "steps are numbered without gaps",
    "the audit names what was lost",
    "the training comes to its end",
    "version numbers never repeat",
})  # fmt: skip
"""Invariants that hold whatever the log lost."""

JUDGED_EVERYWHERE = JUDGED | {
    "a step trains a whole batch",
    "a trained group has a baseline",
    "every entry is in the log or in the archive",
    "nothing unsettled lies below the floor",
    "only graded episodes are trained",
    "the audit balances",
    "the weights hold what the surviving lineage trained",
}
"""Those that hold if no worker lives on that read what was lost. One that does plays on by it until it notices."""


class PowerSupply:
    """Fails as the scenario says."""

    def __init__(self, fixtures: SimulationFixtures, fleet: Deployment) -> None:
        self._fixtures = fixtures
        self._fleet = fleet

    async def run(self) -> None:
        """All losses, one after the other, unless training is finished before."""
        for loss in self._fixtures.scenario.power_losses:
            await anyio.sleep_until(loss.at - loss.lost_seconds)
            await self._lose(loss)

    async def _lose(self, loss: PowerLoss) -> None:
        fixtures, server = self._fixtures, self._fixtures.server
        files, last = server.copy_files(), fixtures.log.last_sequence
        await anyio.sleep_until(loss.at)
        if self._fleet.training_finished.is_set():
            return
        fixtures.observer.disturb("lose_power", seconds=loss.down_seconds)
        fixtures.observer.judged = JUDGED_EVERYWHERE if loss.everywhere else JUDGED
        server.kill()
        for process in fixtures.oracle.processes.values() if loss.everywhere else ():
            process.crash()
        fixtures.observer.trace("lost", last + 1, fixtures.log.last_sequence)
        server.put_back(files)
        fixtures.log_checker.rewind(last)
        await self._check_audit(files)
        await anyio.sleep(loss.down_seconds)
        server.restart()

    async def _check_audit(self, files: Files) -> None:
        """An audit of a server with these files names every entry that the archive has and the log has lost."""
        fixtures = self._fixtures
        server = MemoryServer()
        server.declare(plan_streams(fixtures.scenario, fixtures.configuration))
        server.put_back(files)
        archive = next((each for each in reversed(fixtures.archives) if list_segments(each)), None)
        async with server.connect(RUN, worker="auditor") as bus:
            report = await audit_run(bus, Subjects(RUN), archive=archive)
        found = next((finding for finding in report.findings if finding.kind == "entries_lost"), None)
        self._require_named(archive, found.count if found is not None else 0, found.ids if found is not None else ())

    def _require_named(self, archive: Path | None, count: int, ids: tuple[str, ...]) -> None:
        fixtures = self._fixtures
        held = {entry.sequence: entry for entry in fixtures.log_checker.entries}
        archived = list(read_archive(archive)) if archive is not None else []
        first = next((entry.sequence for entry in archived if held.get(entry.sequence) != entry), math.inf)
        lost = [entry.subject for entry in archived if entry.sequence >= first]
        names = {(subject.split(".")[2], subject.rpartition(".")[2]) for subject in lost}
        named = len(ids) == MAX_IDS or all(any(name in each for each in ids) for _, name in names)
        detail = f"{count} of {len(lost)} entries from {first} on: {', '.join(ids[:4])}"
        fixtures.observer.require(len(names) <= count <= len(lost) and named, "the audit names what was lost", detail)
