"""A record races a freeze from another process, on a real server: it is in the snapshot or refused, never neither or both."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.client.capture_log import CaptureClosed, CaptureLog
from fleetbus.errors import BusError
from tests.support.backends import asyncio_alone
from tests.support.capture_writer import build_record
from tests.support.servers import FORM, RunningServers, running_servers

anyio_backend = asyncio_alone

ROOT = Path(__file__).parents[2]
RUN = "captures"
RACES = 120
CALLS = 6
PLAN = msgspec.structs.replace(plan_run(RUN, lanes=0, max_bytes=0), consumers=())


class Writer:
    """The other process."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def tell(self, *order: Any) -> None:
        await self.process.stdin.send(json.dumps(order).encode() + b"\n")

    async def answer(self) -> Any:
        return json.loads(await self._lines.receive_until(b"\n", 1 << 20))


@asynccontextmanager
async def running_writer(servers: RunningServers, *flags: str) -> AsyncGenerator[Writer]:
    command = [sys.executable, "-m", "tests.support.capture_writer", servers.url, RUN, name_folder(servers), *flags]
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        try:
            writer = Writer(process)
            assert await writer.answer() == "ready"
            yield writer
        finally:
            process.kill()


def name_folder(servers: RunningServers) -> str:
    return str(servers.auth.path) if servers.auth else ""


@asynccontextmanager
async def opened_bus(servers: RunningServers) -> AsyncGenerator[Any]:
    access = build_access("admin", name_folder(servers), RUN)
    async with connect(servers.url, run=RUN, role="admin", worker="freezer", **access) as bus:
        yield bus


@asynccontextmanager
async def declared(folder: Path) -> AsyncGenerator[RunningServers]:
    async with running_servers(folder, [PLAN]) as servers:
        await servers.declare(PLAN)
        yield servers


async def race(log: CaptureLog, writer: Writer, rollout: str, delay: float) -> tuple[set[str], dict[str, str]]:
    """What is in the snapshot, and what the writer was told of each call."""
    await writer.tell(rollout, [f"call-{number}" for number in range(CALLS)], 200)
    await anyio.sleep(delay)
    frozen = await log.freeze(rollout)
    outcomes = await writer.answer()
    assert await log.freeze(rollout) == frozen
    return set(frozen.records), outcomes


async def kill_and_restart(servers: RunningServers) -> None:
    for process in servers.processes:
        await process.kill()
    async with anyio.create_task_group() as tasks:  # those of a cluster are ready once they have found each other
        for process in servers.processes:
            tasks.start_soon(process.restart)


async def wait_for_leader(bus: Bus) -> None:
    """Of three servers that were killed at once one is chosen after seconds: a read is given up before."""
    while FORM == "cluster":
        with suppress(BusError):
            await bus.log_state()
            return
        await anyio.sleep(0.1)


def is_torn(recorded: set[str], outcomes: dict[str, str]) -> bool:
    return recorded != {call for call, outcome in outcomes.items() if outcome == "kept"}


@pytest.mark.integration
@pytest.mark.timeout(180)
async def test_a_record_that_races_a_freeze_is_in_the_snapshot_or_refused(tmp_path: Path) -> None:
    draw = random.Random(1)
    contested = 0
    async with declared(tmp_path) as servers, running_writer(servers) as writer, opened_bus(servers) as bus:
        log = CaptureLog(bus, RUN)
        for number in range(RACES):
            recorded, outcomes = await race(log, writer, f"rollout-{number}", draw.uniform(0, 0.03))
            assert not is_torn(recorded, outcomes), f"in the snapshot: {recorded}; told: {outcomes}"
            contested += len(set(outcomes.values())) == 2
    print(f"{RACES} races of {CALLS} records, {contested} with some kept and some refused")
    assert contested >= RACES // 20, "the freeze hardly ever came in the middle"


@pytest.mark.integration
@pytest.mark.parametrize(("flags", "told"), [((), "refused"), (("--unfenced",), "kept")])
@pytest.mark.timeout(180)
async def test_a_record_that_was_on_its_way_at_the_freeze_is_refused_and_without_compare_and_set_torn(
    tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    async with declared(tmp_path) as servers, running_writer(servers, "--held", *flags) as writer, opened_bus(servers) as bus:
        log = CaptureLog(bus, RUN)
        await writer.tell("rollout", ["call"], 200)
        assert await writer.answer() == "held"
        frozen = await log.freeze("rollout")
        await writer.tell("go on")
        outcomes = await writer.answer()
        assert not frozen.records and outcomes == {"call": told}
        assert is_torn(set(frozen.records), outcomes) == (told == "kept")


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_writers_that_are_killed_in_the_middle_leave_whole_records_or_none(tmp_path: Path) -> None:
    """The record is of five messages, so that many kills come between them. Repeated by another process, it is there once."""
    draw, size, found = random.Random(2), 2_500_000, []
    async with declared(tmp_path) as servers, opened_bus(servers) as bus:
        log = CaptureLog(bus, RUN)
        for number in range(8):
            rollout = f"rollout {number}.*"
            async with running_writer(servers) as writer:
                await writer.tell(rollout, ["call"], size, "begin")
                assert await writer.answer() == "begun call"
                await anyio.sleep(draw.uniform(0, 0.06))
                writer.process.kill()
            stored = "call" in (await log.read(rollout)).records
            found.append(stored)
            if number % 2 or stored:
                await log.put(rollout, "call", build_record("call", size))
            frozen = await log.freeze(rollout)
            expected = {"call": build_record("call", size)} if number % 2 or stored else {}
            assert frozen.records == expected and frozen.incomplete == (not expected)
            assert await log.drop(rollout, frozen.snapshot_id, frozen.version)
        assert (await bus.log_state()).used_bytes < size, "parts of records that were never named are removed, too"
    print(f"{found.count(True)} of {len(found)} were whole when their writer was killed")


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_a_server_that_is_killed_in_the_middle_loses_no_record_and_no_freeze(tmp_path: Path) -> None:
    draw = random.Random(3)
    async with declared(tmp_path) as servers, running_writer(servers) as writer, opened_bus(servers) as bus:
        log = CaptureLog(bus, RUN)
        for number in range(6):
            rollout = f"rollout-{number}"
            await writer.tell(rollout, [f"call-{each}" for each in range(CALLS)], 300_000)
            await anyio.sleep(draw.uniform(0, 0.05))
            await kill_and_restart(servers)
            await wait_for_leader(bus)
            frozen = await log.freeze(rollout)
            outcomes = await writer.answer()
            assert not is_torn(set(frozen.records), outcomes) and await log.freeze(rollout) == frozen
            await kill_and_restart(servers)
            await wait_for_leader(bus)
            assert await log.freeze(rollout) == frozen
            with pytest.raises(CaptureClosed):
                await log.put(rollout, "late", b"late")
            assert await log.drop(rollout, frozen.snapshot_id, frozen.version)
