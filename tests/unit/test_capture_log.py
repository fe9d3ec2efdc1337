"""Records of calls on the log in memory: once, whole, in the snapshot or refused, whatever answers are lost."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_faults import PublishFault
from fleetbus.bus.streams import plan_run
from fleetbus.client.capture_log import CHUNK_BYTES, CaptureClosed, CaptureConflict, CaptureLog
from fleetbus.errors import BusError, PublishUnanswered
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

RUN = "captures"


@asynccontextmanager
async def opened_bus(faults: Faults | None = None, *, window: float = 120.0) -> AsyncGenerator[Bus]:
    server = MemoryServer(faults=faults) if faults else MemoryServer()
    async with server.connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0, duplicate_window_seconds=window))
        yield bus


@asynccontextmanager
async def opened_log(faults: Faults | None = None, *, window: float = 120.0) -> AsyncGenerator[CaptureLog]:
    async with opened_bus(faults, window=window) as bus:
        yield CaptureLog(bus, RUN)


async def test_records_come_back_as_they_were_put() -> None:
    async with opened_log() as log:
        long = random.Random(7).randbytes(3 * CHUNK_BYTES + 17)
        payloads = {"call-1": b"{}", "call-2": long, "call 3.*.>": b"x" * CHUNK_BYTES, "": b""}
        for call, payload in payloads.items():
            await log.put("r", call, payload)
        frozen = await log.freeze("r")
        assert frozen.records == payloads and list(frozen.records) == list(payloads) and not frozen.incomplete
        assert await log.freeze("r") == frozen


@pytest.mark.parametrize("rollout", ["a.b", "a b", "a.*", "a.>", "*", ">", "", "a\nb", "ü" * 900, "$JS.API.>", "a" * 5000])
async def test_any_text_is_the_id_of_one_rollout_alone(rollout: str) -> None:
    async with opened_log() as log:
        await log.put("a.b.c", rollout, b"other")
        await log.put(rollout, rollout, b"own")
        frozen = await log.freeze(rollout)
        assert frozen.records == {rollout: b"own"}
        assert await log.drop(rollout, frozen.snapshot_id, frozen.version)
        assert (await log.freeze("a.b.c")).records == {rollout: b"other"}, "dropped by another rollout's name"


async def test_the_same_record_again_does_nothing_and_another_one_is_a_conflict() -> None:
    async with opened_log() as log:
        await log.put("r", "call", b"one")
        await log.put("r", "call", b"one")
        assert not (await log.freeze("r")).incomplete
        await log.put("r", "call", b"one")  # its first try is in the snapshot: it is no writer that came too late
        with pytest.raises(CaptureConflict):
            await log.put("r", "call", b"two")
        frozen = await log.freeze("r")
        assert frozen.incomplete and frozen.records == {"call": b"one"}


async def test_a_retry_after_the_duplicate_window_is_no_second_record() -> None:
    async with opened_log(window=1.0) as log:
        await log.put("r", "call", b"one")
        await anyio.sleep(30.0)
        await log.put("r", "call", b"one")
        assert (await log.freeze("r")).records == {"call": b"one"}


async def test_nothing_is_written_after_a_freeze_but_that_something_is_missing() -> None:
    async with opened_log() as log:
        await log.put("r", "call-1", b"one")
        before = await log.freeze("r")
        for late in (log.put("r", "call-2", b"two"), log.begin_call("r", "call-2")):
            with pytest.raises(CaptureClosed, match="frozen"):
                await late
        assert await log.freeze("r") == before
        await log.mark_incomplete("r", "call-2")
        after = await log.freeze("r")
        assert after.incomplete and after.version != before.version and after.snapshot_id == before.snapshot_id
        assert not await log.drop("r", before.snapshot_id, before.version), "somebody said that a record is missing"
        assert await log.drop("r", after.snapshot_id, after.version)


async def test_a_call_that_went_out_and_left_no_record_makes_the_snapshot_incomplete() -> None:
    async with opened_log() as log:
        await log.begin_call("r", "call-1")
        await log.begin_call("r", "call-1")
        await log.put("r", "call-1", b"one")
        await log.begin_call("r", "call-2")
        assert (await log.freeze("r")).incomplete


async def test_what_is_dropped_leaves_a_tombstone_until_it_is_swept() -> None:
    async with opened_bus() as bus:
        log = CaptureLog(bus, RUN)
        for rollout in ("r", "kept"):
            await log.put(rollout, "call", bytes(2 * CHUNK_BYTES))
        frozen = await log.freeze("r")
        assert not await log.drop("kept", "", 0), "not frozen"
        assert not await log.drop("r", frozen.snapshot_id, frozen.version + 1)
        assert await log.drop("r", frozen.snapshot_id, frozen.version)
        assert await log.drop("r", frozen.snapshot_id, frozen.version), "its answer was lost, and it is asked again"
        assert not await log.drop("r", "another", frozen.version)
        state = await bus.log_state()
        assert state.entries == 4 and state.used_bytes < 3 * CHUNK_BYTES
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: log.freeze("r"),
            lambda: log.put("r", "call", bytes(2 * CHUNK_BYTES)),
            lambda: log.mark_incomplete("r"),
            lambda: log.begin_call("r", "call"),
        ]
        for call in calls:
            with pytest.raises(CaptureClosed, match="retired"):
                await call()
        await anyio.sleep(10.0)
        assert [await log.sweep(60.0), await log.sweep(5.0), await log.sweep(5.0)] == [0, 1, 0]
        assert (await log.freeze("kept")).records == {"call": bytes(2 * CHUNK_BYTES)}
        assert (await log.freeze("r")).records == {}


async def test_a_purge_that_was_killed_is_made_up_for_by_the_next_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_bus() as bus:
        log = CaptureLog(bus, RUN)
        await log.put("r", "call", bytes(100))
        frozen = await log.freeze("r")

        async def fail(*_: object) -> None:
            raise BusError("nobody answers")

        with monkeypatch.context() as patched:
            patched.setattr(type(bus), "purge", lambda *_, **__: fail())
            assert await log.drop("r", frozen.snapshot_id, frozen.version)
        assert (await bus.log_state()).entries == 4
        assert await log.sweep(3600.0) == 0
        assert (await bus.log_state()).entries == 1


async def test_a_record_that_came_too_late_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_bus() as bus:
        log, store = CaptureLog(bus, RUN), CaptureLog._store
        await log.put("r", "call", b"one")

        async def drop_and_store(self: CaptureLog, rollout: str, call: str, payload: bytes) -> tuple[int, ...]:
            frozen = await self.freeze(rollout)
            assert await self.drop(rollout, frozen.snapshot_id, frozen.version)
            return await store(self, rollout, call, payload)

        monkeypatch.setattr(CaptureLog, "_store", drop_and_store)
        with pytest.raises(CaptureClosed):
            await log.put("r", "late", bytes(2 * CHUNK_BYTES))
        assert (await bus.log_state()).entries == 1, "the tombstone"
        await anyio.sleep(1.0)
        assert await log.sweep(0.5) == 1 and (await bus.log_state()).entries == 0


class LostAnswers(Faults):
    """A third of all publishes, or of their answers, is lost; all take their time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        drawn, seconds = self._random.random(), self._random.uniform(0.0, 0.2)
        return PublishFault(seconds_before=seconds, lost="answer" if drawn < 0.2 else "message" if drawn < 0.35 else "")


@pytest.mark.parametrize("seed", range(8))
async def test_writers_at_once_whose_answers_are_lost_leave_each_record_once_or_are_refused(seed: int) -> None:
    kept, refused = [], []
    async with opened_log(LostAnswers(seed), window=0.5) as log:

        async def write(call: str) -> None:
            while True:
                with suppress(PublishUnanswered):
                    try:
                        await log.put("r", call, call.encode())
                        kept.append(call)
                    except CaptureClosed:
                        refused.append(call)
                    return

        async with anyio.create_task_group() as tasks:
            for number in range(24):
                tasks.start_soon(write, f"call-{number}")
            await anyio.sleep(seed * 0.5)
            frozen = await log.freeze("r")
        assert sorted(frozen.records) == sorted(kept) and len(kept) + len(refused) == 24 and refused
        assert await log.freeze("r") == frozen
