"""Shared objects of one world: the scenario, the server with its network, and the observers."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.streams import lane_stream, log_stream
from fleetbus.config.settings import Configuration
from tests.simulation.deployment.configuration import ARCHIVE, build_configuration, plan_streams
from tests.simulation.judge.log_checker import LogChecker
from tests.simulation.judge.oracle import FaultOracle
from tests.simulation.observer import Observer
from tests.simulation.platform.network_faults import SeededNetworkFaults
from tests.simulation.platform.process import RUN
from tests.simulation.platform.storage_faults import Disks
from tests.simulation.scenario.shape import Scenario


class SimulationFixtures(msgspec.Struct, frozen=True, kw_only=True):
    """One world before any process starts. ``archives``: the recorder's folders, another once the log lost what is in it."""

    scenario: Scenario
    configuration: Configuration
    archives: list[Path]
    network_faults: SeededNetworkFaults
    server: MemoryServer
    observer: Observer
    oracle: FaultOracle
    log_checker: LogChecker
    disks: Disks
    folder: Path

    @property
    def archive(self) -> Path:
        """The recorder's folder as of now."""
        return self.archives[-1]

    @property
    def log(self) -> MemoryStream:
        return self.server.stream(log_stream(RUN))


def build_fixtures(scenario: Scenario, observer: Observer, folder: Path) -> SimulationFixtures:
    """A server with the run declared on it, and checkers that receive every entry."""
    configuration = build_configuration(scenario, folder)
    network_faults = SeededNetworkFaults(scenario.network_faults, scenario.seed, observer)
    server = MemoryServer(faults=network_faults)
    oracle = FaultOracle(observer, scenario, grace_seconds=configuration.limits.grace)
    oracle.now_ns = server.now_ns
    log_checker = LogChecker(observer, oracle, scenario, str(folder))
    server.declare(plan_streams(scenario, configuration))
    server.stream(log_stream(RUN)).on_stored["log_checker"] = log_checker.on_stored
    server.stream(lane_stream(RUN)).on_stored["log_checker"] = log_checker.on_lane
    return SimulationFixtures(
        scenario=scenario,
        configuration=configuration,
        archives=[folder / ARCHIVE],
        network_faults=network_faults,
        server=server,
        observer=observer,
        oracle=oracle,
        log_checker=log_checker,
        disks=Disks(random.Random(f"disks/{scenario.seed}"), observer),
        folder=folder,
    )
