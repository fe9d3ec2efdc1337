"""A recorder whose disk is full waits for room and goes on: the log is not trimmed meanwhile, and nothing is missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.log.archive_format import replace_synced
from fleetbus.log.archive_reader import read_archive
from fleetbus_schemas import Subjects
from fleetbus_workers.recorder import worker
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.small_deployment import RUN, build_configuration, run_inline
from tests.support.virtual_time import virtual_time

S = Subjects(RUN)

anyio_backend = virtual_time


class FullDisk:
    """Takes half of what is written, and no more, while it is full; or takes all, and says only at the ``sync`` that it has no
    room for it, as one does that gives out its blocks late."""

    def __init__(self, patch: pytest.MonkeyPatch, found_at: str) -> None:
        self.is_full = False
        self.refused = 0
        self._write, self._sync = os.write, os.fsync
        patch.setattr(os, *(("write", self.write) if found_at == "write" else ("fsync", self.sync)))
        patch.setattr("fleetbus.log.archive_writer.replace_synced", self.replace)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.is_full:
            return self._write(descriptor, data)
        self._write(descriptor, data[: len(data) // 2])
        return self._refuse()

    def sync(self, descriptor: int) -> None:
        if self.is_full:
            self._refuse()
        self._sync(descriptor)

    def replace(self, file: Path, content: bytes) -> None:
        if self.is_full:
            self._refuse()
        replace_synced(file, content)

    def _refuse(self) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("found_at", ["write", "sync"])
async def test_a_recorder_on_a_full_disk_waits_for_room_and_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_at: str
) -> None:
    disk, drain = FullDisk(monkeypatch, found_at), anyio.Event()
    async with MemoryServer().connect(RUN) as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run(RUN, lanes=1))

        async def record() -> None:
            await run_recorder(
                bus, configuration=build_configuration(), name="recorder", drain=drain, folder=tmp_path,
                settings=RecorderSettings(settle_seconds=1.0), runtime=Runtime(offload=run_inline),
            )  # fmt: skip

        tasks.start_soon(record)
        for number in range(40):
            disk.is_full = 10 <= number < 30
            await bus.publish(S.life("environment", "w"), b"x" * 100)
            await anyio.sleep(2)
        assert disk.refused >= 2
        await anyio.sleep(worker.FULL_DISK_SECONDS)
        drain.set()
    archived = [entry.sequence for entry in read_archive(tmp_path)]
    assert archived == list(range(1, archived[-1] + 1))
    assert archived[-1] > 40
