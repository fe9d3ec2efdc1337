"""The holder of the run's own server: a full disk under it ends with the server working again."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus_workers.up import server
from fleetbus_workers.up.address import Address
from fleetbus_workers.up.server import FULL, hold_server


def address(file: Path) -> Address:
    return msgspec.json.decode(file.read_bytes(), type=Address)


@asynccontextmanager
async def hold_server_process(folder: Path) -> AsyncIterator[Path]:
    """A held server; the file that tells its address."""
    file = folder / "server.json"
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_server, folder / "store", 0, file)
            while not file.exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            yield file
            tasks.cancel_scope.cancel()


def write_full_disk_error(folder: Path) -> None:
    with (folder / "store" / "nats-server.log").open("ab") as log:
        log.write(b"[ERR] JetStream failed to store a msg on stream: write 1.blk: " + FULL + b"\n")


async def test_a_server_whose_disk_was_full_is_started_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DISK_CHECK_SECONDS", 0.05)
    usage = shutil.disk_usage(tmp_path)
    looked = anyio.Event()

    def full(_: Path) -> object:
        looked.set()
        return usage._replace(free=0)

    async with hold_server_process(tmp_path) as file:
        before = address(file)
        monkeypatch.setattr(shutil, "disk_usage", full)
        write_full_disk_error(tmp_path)
        await looked.wait()
        assert address(file).pid == before.pid
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))
        write_full_disk_error(tmp_path)
        while address(file).pid == before.pid:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert address(file).url == before.url
