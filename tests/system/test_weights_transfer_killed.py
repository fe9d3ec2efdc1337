"""A trainer process or an engine is killed in the middle of a transfer: no engine ever samples from a torn version, all that
are left follow the log, and the next learner goes on."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished
from tests.support.ports import free_ports
from tests.support.trainable_model import make_model
from tests.support.transfer_roles import ENGINE_POINTS, LEARNER_POINTS, RUN, SUBJECTS, hash_tensors, run_engine, run_trainer

LIMIT_SECONDS = 60.0
PUBLISH_SECONDS = 20.0
"""More than a publication takes on a busy machine, and less than a learner that waits for a dead engine would take."""


class Fleet:
    """The processes of one run by name, and what engines noted."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._model = make_model(folder / "model")
        self._out = folder / "weights"
        self._out.mkdir()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.transfer_roles"])
        self.processes: dict[str, BaseProcess] = {}
        self.lineage = 0

    def start_engine(self, name: str, point: str = "") -> None:
        arguments = (name, self._url, self._model, self._folder / name, point)
        self._start(name, run_engine, *arguments)

    def start_learner(self, point: str = "", engines: int = 2) -> None:
        """A new lineage in two processes, which publishes one version."""
        self.lineage += 1
        (port,) = free_ports(1)
        for rank in (0, 1):
            arguments = (rank, port, self._url, self._model, self._out, self.lineage, engines, point)
            self._start(f"trainer-{rank}", run_trainer, *arguments)

    def _start(self, name: str, function: Any, *arguments: object) -> None:
        self.kill(name)
        process = self._context.Process(target=function, args=arguments, name=name)
        process.start()
        self.processes[name] = process

    def kill(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.join(10)

    def wait(self, *names: str) -> list[int | None]:
        """Exit codes of processes that end by themselves."""
        ends = time.monotonic() + LIMIT_SECONDS
        for name in names:
            self.processes[name].join(max(ends - time.monotonic(), 0.1))
        return [self.processes[name].exitcode for name in names]

    def read_notes(self, name: str) -> list[dict[str, Any]]:
        file = self._folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def publish_seconds(self) -> float:
        return float((self._out / f"seconds-{self.lineage}").read_text())


@contextmanager
def open_fleet(folder: Path, url: str) -> Iterator[Fleet]:
    fleet = Fleet(folder, url)
    try:
        yield fleet
    finally:
        for name in list(fleet.processes):
            fleet.kill(name)


@asynccontextmanager
async def open_run(folder: Path) -> AsyncIterator[tuple[Bus, Fleet]]:
    async with run_server(folder / "store", ends_with_parent=True) as server, connect(server.url, run=RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=16))
        with open_fleet(folder, server.url) as fleet:
            yield bus, fleet


async def read_digests(bus: Bus) -> dict[int, str]:
    """By version the digest that the log has for it."""
    entries = [entry async for entry in bus.scan([SUBJECTS.policy("default")])]
    found = decode_entries(PolicyPublished, entries, beside=(LineageStarted,))
    return {each.version: hash_tensors({entry.name: entry.sha256 for entry in each.manifest}) for _, each in found}


async def wait_for_newest(bus: Bus, fleet: Fleet, *names: str) -> None:
    newest = max(await read_digests(bus))
    with anyio.fail_after(LIMIT_SECONDS):
        for name in names:
            while not [note for note in fleet.read_notes(name) if note["version"] == newest]:  # noqa: ASYNC110 - of a file
                await anyio.sleep(0.05)


async def kill_at(bus: Bus, fleet: Fleet, side: str, point: str) -> str:
    """One kill, the version that was on its way, the next one, and what stands in the log and in the engines then."""
    before = len(await read_digests(bus))
    if side == "engine":
        fleet.start_engine("engine-0", point)
        if before:
            await wait_for_newest(bus, fleet, "engine-0")
    fleet.start_learner(point if side == "learner" else "")
    codes = await anyio.to_thread.run_sync(fleet.wait, "trainer-0", "trainer-1")
    if side == "engine":
        assert codes == [0, 0] and fleet.publish_seconds() < PUBLISH_SECONDS
        assert await anyio.to_thread.run_sync(fleet.wait, "engine-0") == [-9]
        await wait_for_newest(bus, fleet, "engine-1")
        fleet.start_engine("engine-0")
    else:
        assert -9 in codes
        announced = len(await read_digests(bus)) - before
        # the file of a version is written and announced beside its transfer, whatever that has come to
        assert announced == (point == "announced") or (announced == 1 and point.startswith(("piece", "sent")))
    if await read_digests(bus):
        await wait_for_newest(bus, fleet, "engine-0", "engine-1")
    fleet.start_learner()
    assert await anyio.to_thread.run_sync(fleet.wait, "trainer-0", "trainer-1") == [0, 0]
    await wait_for_newest(bus, fleet, "engine-0", "engine-1")
    known = await read_digests(bus)
    for name in ("engine-0", "engine-1"):
        for note in fleet.read_notes(name):
            assert note["digest"] == known[note["version"]], (side, point, name, note)
    ways = [fleet.read_notes(name)[-1]["way"] for name in ("engine-0", "engine-1")]
    return f"{side} killed at {point}: next version by {' and '.join(ways)}"


async def kill_at_all(folder: Path, points: list[tuple[str, str]]) -> list[str]:
    async with open_run(folder) as (bus, fleet):
        for name in ("engine-0", "engine-1"):
            fleet.start_engine(name)
        fleet.start_learner()
        assert await anyio.to_thread.run_sync(fleet.wait, "trainer-0", "trainer-1") == [0, 0]
        await wait_for_newest(bus, fleet, "engine-0", "engine-1")
        assert [fleet.read_notes(name)[-1]["way"] for name in ("engine-0", "engine-1")] == ["transfer", "transfer"]
        return [await kill_at(bus, fleet, *point) for point in points]


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_two_trainers_send_to_two_engines_and_a_kill_on_either_side_tears_nothing(tmp_path: Path) -> None:
    await kill_at_all(tmp_path, [("learner", "piece 2"), ("engine", "piece 2")])


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_kills_at_twenty_points_of_a_transfer_tear_nothing(tmp_path: Path) -> None:
    points = [("learner", point) for point in LEARNER_POINTS] + [("engine", point) for point in ENGINE_POINTS]
    assert len(points) == 20
    found = await kill_at_all(tmp_path, points)
    print("\n".join(found))
