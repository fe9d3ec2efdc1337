"""Run seeds: one at a time in this process, or many on several processes."""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus_workers.learner import pool
from fleetbus_workers.virtual_time import run_deterministically
from tests.simulation.observer import Observer, Violation
from tests.simulation.scenario.drawing import draw_scenario
from tests.simulation.scenario.shape import FaultSet, Scenario
from tests.simulation.timers import slowed_timers
from tests.simulation.world import World

SHARED_MEMORY = Path("/dev/shm")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one seed. ``outcomes`` counts episodes; ``virtual_seconds`` is how long the fleet lived."""

    seed: int
    violations: tuple[Violation, ...]
    trace_hash: str = ""
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    entries: int = 0
    turns: int = 0
    attempts: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    disturbances: dict[str, int] = msgspec.field(default_factory=dict)
    started: dict[str, int] = msgspec.field(default_factory=dict)
    """Processes by role."""
    most_entries: int = 0
    most_checkpoints: int = 0
    """What the log and the run's folder held at most, where a scenario bounds it."""
    lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.violations


def run_seed(seed: int, *, keep_lines: bool = False, scenario: Scenario | None = None, faults: FaultSet = "usual") -> Report:
    """Simulate one seed from beginning to end; anything that is no violation but an error of the simulation is raised."""
    folder = Path(tempfile.mkdtemp(prefix="fleetbus-sim-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        return _run(scenario or draw_scenario(seed, faults), folder, keep_lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect(0)  # everything made during the run is young, for nothing was collected then


def _run(scenario: Scenario, folder: Path, keep_lines: bool) -> Report:
    started = time.process_time()

    async def simulate() -> Report:
        observer = Observer(keep_lines=keep_lines)
        with _capture_logs(observer), _tiny_limits(scenario), slowed_timers(scenario.pace.timers):
            world = World(scenario, observer, folder)
            await world.run()
        return _build_report(scenario.seed, world, observer, anyio.current_time(), time.process_time() - started)

    return run_deterministically(simulate, seed=scenario.seed)


def _build_report(seed: int, world: World, observer: Observer, virtual_seconds: float, cpu_seconds: float) -> Report:
    record = world.log_checker.episodes.record.values()
    return Report(
        seed=seed,
        trace_hash=observer.trace_hash,
        violations=tuple(observer.violations),
        virtual_seconds=round(virtual_seconds, 3),
        cpu_seconds=round(cpu_seconds, 3),
        entries=len(world.log_checker.entries),
        turns=sum(len(each.turns) for each in record),
        attempts=sum(len(each.claims) for each in record),
        outcomes=dict(Counter(f"{each.result.outcome} {each.result.error_class}".strip() for each in record if each.result)),
        disturbances=dict(Counter(each.kind for each in observer.disturbances)),
        started=dict(Counter(each.role for each in world.processes)),
        most_entries=world.bounds.most_entries,
        most_checkpoints=world.bounds.most_checkpoints,
        lines=tuple(observer.lines or ()),
    )


@contextmanager
def _tiny_limits(scenario: Scenario) -> Iterator[None]:
    """Limits of the workers that no run of a simulation would reach, as small as the scenario says."""
    before = pool.EXCLUSIONS_PER_ENTRY
    pool.EXCLUSIONS_PER_ENTRY = scenario.exclusions_per_entry or before
    try:
        yield
    finally:
        pool.EXCLUSIONS_PER_ENTRY = before


@contextmanager
def _capture_logs(observer: Observer) -> Iterator[None]:
    """The workers' own log lines stand among the trace's lines if those are kept, and nowhere else."""

    def keep(_logger: Any, method: str, event: Any) -> Any:
        if observer.lines is not None:
            observer.lines.append(f"{anyio.current_time():.6f} {method} {event}")
        raise structlog.DropEvent

    level = logging.INFO if observer.lines is not None else logging.CRITICAL
    before = structlog.get_config()
    processors: Sequence[Any] = [structlog.contextvars.merge_contextvars, keep]
    structlog.configure(processors=processors, wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)
