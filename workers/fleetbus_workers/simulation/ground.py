"""What everything in one world shares: the scenario, the server with its network, and whoever watches."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.streams import lane_stream, log_stream, plan_run
from fleetbus.config.settings import Configuration
from fleetbus_workers.simulation.books import Books
from fleetbus_workers.simulation.configured import ARCHIVE, LANES, LOG_BYTES, configuration_of
from fleetbus_workers.simulation.judge import Judge
from fleetbus_workers.simulation.noise import SeededNoise
from fleetbus_workers.simulation.process import RUN
from fleetbus_workers.simulation.scenario import Scenario
from fleetbus_workers.simulation.watch import Watch


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """One world before anybody lives in it. ``archive`` is the recorder's folder."""

    scenario: Scenario
    configuration: Configuration
    archive: Path
    noise: SeededNoise
    server: MemoryServer
    watch: Watch
    judge: Judge
    books: Books

    @property
    def log(self) -> MemoryStream:
        return self.server.stream(log_stream(RUN))


def prepared(scenario: Scenario, watch: Watch, folder: Path) -> Ground:
    """A server with the run declared on it, and books that hear of every entry."""
    configuration = configuration_of(scenario, folder)
    noise = SeededNoise(scenario.noise, random.Random(f"noise/{scenario.seed}"), watch)
    server = MemoryServer(faults=noise)
    judge = Judge(watch, grace_seconds=configuration.limits.grace, idle_seconds=configuration.limits.idle)
    books = Books(watch, judge, scenario, str(folder))
    window_seconds = scenario.duplicate_window_seconds
    server.declare(plan_run(RUN, lanes=LANES, max_bytes=LOG_BYTES, duplicate_window_seconds=window_seconds))
    server.stream(log_stream(RUN)).on_stored["books"] = books.on_stored
    server.stream(lane_stream(RUN)).on_stored["books"] = books.on_lane
    return Ground(
        scenario=scenario,
        configuration=configuration,
        archive=folder / ARCHIVE,
        noise=noise,
        server=server,
        watch=watch,
        judge=judge,
        books=books,
    )
