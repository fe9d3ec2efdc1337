"""A policy writes folders in folders, more files than its disk has, and folders in place of files."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.tasks.harbor import read_harbor_task
from fleetbus_workers.environment.adapters.harbor.box import Recipe
from fleetbus_workers.environment.adapters.harbor.sandbox_box import PREFIX, SandboxBoxes
from fleetbus_workers.environment.isolation.foreign_files import (
    TreeTooDeep,
    copy_tree,
    measure_tree,
    remove_tree,
    sweep_folders,
)
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, SandboxLimits, find_isolation
from tests.support.backends import asyncio_alone

TASK = Path(__file__).parents[2] / "docs/examples/harbor/roman-numerals"
NEST = "import os\nfor _ in range(1500):\n    os.mkdir('deep'); open('file', 'w').close(); os.chdir('deep')\n"
STORAGE_MIB = 16
WOULD_WRITE_MIB = 1600


anyio_backend = asyncio_alone


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder of a worker that has exited, with 1,500 folders in each other; what a test leaves of it is removed."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.uname().nodename[:24]}_999999999_1-"))
    try:
        subprocess.run([sys.executable, "-c", NEST], cwd=folder, check=True, timeout=50)
        yield folder
    finally:  # pytest removes recursively
        subprocess.run(["rm", "-rf", folder, tmp_path / "copy"], check=True, timeout=50)


@pytest.mark.integration
def test_folders_deeper_than_calls_and_paths_reach_are_removed(deep: Path, tmp_path: Path) -> None:
    mine = deep.rename(tmp_path / "copy")  # out of the sight of other workers' sweeps
    remove_tree(mine)
    assert not mine.exists()


@pytest.mark.integration
def test_they_are_swept_when_their_worker_has_exited(deep: Path) -> None:
    sweep_folders(PREFIX)
    assert not deep.exists()


def test_a_removal_follows_no_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "folder").mkdir(parents=True)
    (kept / "folder/file").touch()
    box = tmp_path / "box"
    (box / "inner").mkdir(parents=True)
    (box / "inner/link").symlink_to(kept)
    (box / "link").symlink_to(kept / "folder")
    remove_tree(box)
    assert (kept / "folder/file").exists() and not box.exists()


@pytest.mark.integration
def test_they_are_neither_counted_as_nothing_nor_copied(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(TreeTooDeep):
        measure_tree(deep)
    with pytest.raises(TreeTooDeep):
        copy_tree(deep, tmp_path / "copy")


@pytest.mark.integration
def test_folders_and_empty_files_count_as_well(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"f{number}").touch()
    assert measure_tree(tmp_path) >= 2000 * 512


@pytest.mark.integration
@pytest.mark.parametrize(
    "command",
    [
        f"for i in $(seq 1 {WOULD_WRITE_MIB // 4}); do head -c 4194304 /dev/zero > big$i; done; sleep 30",
        "python3 -c 'import os; [os.mkdir(str(i)) for i in range(200000)]; import time; time.sleep(30)'",
        f"python3 -c {shlex.quote(NEST)}",
    ],
    ids=["files", "folders", "depth"],
)
async def test_a_command_that_fills_its_disk_ends_while_it_runs(command: str) -> None:
    try:
        isolation = await find_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    place = msgspec.structs.replace(read_harbor_task(TASK).config.environment, storage_mb=STORAGE_MIB)
    boxes = SandboxBoxes(isolation, SandboxLimits(seconds=60.0, processes=64))
    with anyio.fail_after(100):
        async with boxes.run():
            box = await boxes.start(Recipe(folder=TASK / "environment", digest="a", place=place))
            result = await box.run(command, user=None, variables={}, seconds=50)
            measured = await anyio.run_process(["du", "-sm", str(box.folder)])
            await box.stop()
    assert "the disk is full" in result.output and result.exit_code == 137
    assert int(measured.stdout.split()[0]) < WOULD_WRITE_MIB / 2, "how much it gets done is a matter of the disk's speed"
