"""Calls that do several things at a time fail with the one error that callers wait for, and leave nothing half done."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.nats import direct, objects
from fleetbus.bus.nats.api import JetStreamApi
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered
from fleetbus_schemas import Subjects
from fleetbus_workers.recorder.trim_limit import compute_trim_limit
from tests.support.servers import connect, run_server

RUN = "r"
SUBJECTS = Subjects(RUN)


@asynccontextmanager
async def served(store: Path) -> AsyncIterator[tuple[NatsBus, NatsServerProcess]]:
    with anyio.fail_after(50):
        async with run_server(store) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            assert isinstance(bus, NatsBus)
            yield bus, server


async def test_histories_of_several_subjects_that_nobody_answers_raise_what_one_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_TRIES", 0)
    monkeypatch.setattr(direct, "_TRY_SECONDS", 0.1)
    async with served(tmp_path) as (bus, server):
        await server.kill()
        with pytest.raises(RequestUnanswered):
            await bus.history([SUBJECTS.episode("a"), SUBJECTS.episode("b")])
        await server.restart()


async def test_weights_that_cannot_be_put_raise_what_the_publisher_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(objects.CHUNK_BYTES * 20))
    async with served(tmp_path / "store") as (bus, server):
        store = bus.objects("weights")
        await store.put("first", tmp_path / "weights")
        monkeypatch.setattr(objects, "PUT_LIMIT_SECONDS", 0.1)
        monkeypatch.setattr(objects, "CLEAR_LIMIT_SECONDS", 0.1)
        declare = objects.declare_bucket  # type: ignore[attr-defined]

        async def then_die(api: JetStreamApi, bucket: str, *, replicas: int = 0) -> None:
            await declare(api, bucket, replicas=replicas)
            await server.kill()

        monkeypatch.setattr(objects, "declare_bucket", then_die)
        with pytest.raises(PublishUnanswered):
            await store.put("second", tmp_path / "weights")
        await server.restart()


class FullDisk:
    """A file whose disk is full after the first write."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._writes = 0

    async def __aenter__(self) -> FullDisk:
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._file.aclose()

    async def write(self, block: bytes) -> int:
        self._writes += 1
        if self._writes > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(await self._file.write(block))


async def test_weights_that_do_not_fit_the_disk_raise_an_error_of_the_disk_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(objects.CHUNK_BYTES * 200))
    open_file = anyio.open_file

    async def full(*args: Any) -> FullDisk:
        return FullDisk(await open_file(*args))

    async with served(tmp_path / "store") as (bus, _):
        store = bus.objects("weights")
        await store.put("weights", tmp_path / "weights")
        (tmp_path / "fetched").mkdir()
        monkeypatch.setattr(anyio, "open_file", full)
        with pytest.raises(OSError, match="No space left"):
            await store.get("weights", tmp_path / "fetched" / "weights")
        monkeypatch.undo()
        assert not list((tmp_path / "fetched").iterdir())
        await store.get("weights", tmp_path / "fetched" / "weights")
        assert (tmp_path / "fetched" / "weights").read_bytes() == (tmp_path / "weights").read_bytes()


async def test_a_search_for_the_floor_that_nobody_answers_raises_what_the_recorder_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unanswered(bus: MemoryBus, subject: str, *, start: int) -> StreamEntry | None:
        raise RequestUnanswered(subject)

    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=2))
        for number in range(4):
            await bus.publish(SUBJECTS.task("default", f"e{number}"), b"x")
        monkeypatch.setattr(MemoryBus, "next_entry", unanswered)
        with pytest.raises(RequestUnanswered):
            await compute_trim_limit(bus, limit=4, is_ignorable=lambda subject: False)


@pytest.mark.parametrize("after", [12, 30], ids=["in their midst", "after the last"])
@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_weights_that_could_not_be_put_leave_no_chunks_on_the_server(
    how: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are put again and again: on a server that is nearly full, what each try leaves would take all the room there is."""
    (tmp_path / "weights").write_bytes(os.urandom(objects.CHUNK_BYTES * 30))
    async with served(tmp_path / "store") as (bus, _):
        store = bus.objects("weights")
        await store.put("first", tmp_path / "weights")
        publish, stored, enough = store._publish, [0], anyio.Event()  # type: ignore[attr-defined]

        async def then_full(subject: str, payload: bytes) -> int:
            stored[0] += 1
            if stored[0] > after:
                enough.set()
                if how == "cancelled":
                    await anyio.sleep_forever()
                raise LogFull(subject)
            return int(await publish(subject, payload))

        async def held() -> int:
            return int((await bus._connection.api.ask("STREAM.INFO.OBJ_weights"))["state"]["messages"])

        before = await held()
        monkeypatch.setattr(store, "_publish", then_full)
        if how == "refused":
            with pytest.raises(LogFull):
                await store.put("second", tmp_path / "weights")
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(store.put, "second", tmp_path / "weights")
                await enough.wait()
                group.cancel_scope.cancel()
        assert await held() == before
