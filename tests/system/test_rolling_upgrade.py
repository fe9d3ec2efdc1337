"""A run goes on while every role of it is replaced by one of this version, in the order of docs/cluster.md.

The version before is the revision that FLEETBUS_UPGRADE_FROM names, or else the commit before the last merge, or before
this one: `just upgrade`. Its files are taken out of the repository; where git has no such commit, as in a shallow clone, the
test says so and is skipped (docs/decisions/0218-kept-examples-and-a-rolling-upgrade.md).
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.log.episodes import decode_entries
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import (
    EpisodeFinished,
    StepTrained,
    Subjects,
    TrainingFinished,
    WorkerDraining,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_schemas.protocol import PROTOCOL

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rolling_role.py")
RUN = "rolling"
S = Subjects(RUN)
STEPS = 60
BEFORE = 4
"""Steps of training between one replacement and the next."""

SETTINGS = {
    "RUN_NAME": RUN, "NATS_LANES": "4", "LEARNER_STEPS": str(STEPS), "LEARNER_GROUPS": "2", "LEARNER_GROUP_SIZE": "2",
    "LEARNER_CHECKPOINT_EVERY": "2", "LEARNER_CHECKPOINT_WAIT": "1", "EVALUATION_EPISODES": "0", "ENVIRONMENT_SLOTS": "8",
}  # fmt: skip
ORDER = ("recorder", "environment-1", "environment-2", "inference-1", "inference-2", "learner")
"""Of docs/cluster.md, after `fleetbus init`."""


def find_revision() -> str:
    if named := os.environ.get("FLEETBUS_UPGRADE_FROM"):
        return named
    merged = git("rev-list", "--merges", "-n", "1", "HEAD").decode().strip()
    return f"{merged}^1" if merged else "HEAD~1"


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The files of the version before."""
    try:
        revision = find_revision()
        files = git("archive", revision, "schemas", "fleetbus", "workers")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        said = getattr(error, "stderr", b"").decode().strip() or str(error)
        pytest.skip(f"git has no version before this one ({said}): fetch more history, or set FLEETBUS_UPGRADE_FROM")
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    print(f"upgrade from {git('log', '-1', '--format=%h %s', revision).decode().strip()}")
    return tmp_path / "old"


class Fleet:
    """The processes of a run, each of one of two versions."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        self._variables = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
        self._variables |= {f"FLEETBUS_{name}": value for name, value in SETTINGS.items()} | {"FLEETBUS_NATS_URL": url}
        self.processes: dict[str, anyio.abc.Process] = {}

    def _line(self, name: str) -> list[str]:
        more = [str(self._folder / "archive")] if name == "recorder" else []
        return [sys.executable, str(SCRIPT), name.partition("-")[0], name, *more]

    def _environment(self, root: Path) -> dict[str, str]:
        return self._variables | {"PYTHONPATH": os.pathsep.join(str(root / part) for part in (".", "schemas", "workers"))}

    async def init(self, root: Path) -> None:
        ended = await anyio.run_process(
            self._line("init"), cwd=self._folder, env=self._environment(root), check=False, stderr=subprocess.STDOUT
        )
        assert ended.returncode == 0, ended.stdout.decode()

    async def start(self, name: str, root: Path) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await anyio.open_process(
                self._line(name), cwd=self._folder, env=self._environment(root), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip

    async def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            status = await process.wait()
        await process.aclose()
        assert status == 0, (self._folder / f"{name}.log").read_text()[-4000:]

    async def kill(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.aclose()


@asynccontextmanager
async def fleet(url: str, folder: Path) -> AsyncIterator[Fleet]:
    started = Fleet(url, folder)
    try:
        yield started
    finally:
        with anyio.CancelScope(shield=True):
            await started.kill()


async def wait_for_steps(bus: Bus, count: int) -> None:
    """Until so many steps were trained after now."""
    start = (await bus.log_state()).last_sequence + 1
    with anyio.fail_after(90):
        async with bus.read([S.train("default")], start=start) as reader:
            while count:
                message = read_stored(await reader.receive())
                assert not isinstance(message, TrainingFinished), "training ended before every role was replaced: raise STEPS"
                count -= isinstance(message, StepTrained)


async def wait_for_end(bus: Bus) -> None:
    async with bus.read([S.train("default")]) as reader:
        while not isinstance(read_stored(await reader.receive()), TrainingFinished):
            pass


async def read_protocols(bus: Bus) -> dict[str, list[int]]:
    """The protocols of each worker's starts, oldest first."""
    found: dict[str, list[int]] = {}
    beside = (WorkerDraining, WorkerStopped, WorkerFailed)
    stored = [entry async for entry in bus.scan([f"fb.{RUN}.life.>"])]
    for _, started in decode_entries(WorkerStarted, stored, beside=beside):
        found.setdefault(started.worker, []).append(started.protocol)
    return found


async def test_every_role_is_replaced_by_this_version_while_episodes_run_and_nobody_is_lost(old: Path, tmp_path: Path) -> None:
    async with run_server(tmp_path / "nats") as server, connect(server.url, run=RUN, worker="test") as bus:
        async with fleet(server.url, tmp_path) as running:
            await running.init(old)
            for name in ORDER:
                await running.start(name, old)
            await wait_for_steps(bus, BEFORE)
            await running.init(ROOT)
            for name in ORDER:
                await running.stop(name)
                await running.start(name, ROOT)
                await wait_for_steps(bus, BEFORE)
            with anyio.fail_after(150):
                await wait_for_end(bus)
                assert await running.processes["learner"].wait() == 0
            for name in ORDER[:-1]:
                await running.stop(name)
        protocols = await read_protocols(bus)
        assert {name: told[-1] for name, told in protocols.items()} == dict.fromkeys(ORDER, PROTOCOL)
        assert all(len(told) == 2 for told in protocols.values()), protocols
        report = await audit_run(bus, S, archive=tmp_path / "archive")
        assert report.balanced, report
        entries = [read_stored(entry) async for entry in bus.scan([f"fb.{RUN}.episode.*"])]
        outcomes = Counter(entry.outcome for entry in entries if isinstance(entry, EpisodeFinished))
        print(f"protocols: {protocols}; outcomes in the log: {dict(outcomes)}")
        assert set(outcomes) <= {"completed", "truncated", "cancelled", "stale"}
    shutil.rmtree(tmp_path / "old")
