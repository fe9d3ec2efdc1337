"""A run goes from an earlier release to this one while it trains, in the order of docs/cluster.md: ``just upgrade [REVISION]``.

Real roles as processes, without a model (`lossy_roles`), on one real server. The earlier release is a commit, UPGRADE_FROM, by
default the newest that is a day older than this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
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
from fleetbus_schemas import StepTrained, Subjects
from fleetbus_schemas.protocol import PROTOCOL, UNNUMBERED
from tests.support.rig import ENTRIES, TRAIN

ROOT = Path(__file__).parents[2]
SCRIPT = Path("tests/system/lossy_roles.py")
ROLES = ("environment", "inference", "learner")
STEPS, STEPS_BETWEEN = 300, 20
DAY_SECONDS = 86_400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The files of the earlier release."""
    newest = int(git("log", "-1", "--format=%ct") or 0)
    revision = os.environ.get("UPGRADE_FROM") or git("rev-list", "-1", f"--before={newest - DAY_SECONDS}", "HEAD")
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False) if revision else None
    if archive is None or archive.returncode:
        pytest.skip(f"no earlier release here: {revision or 'the history is too short'} (UPGRADE_FROM=REVISION)")
    folder = tmp_path / "earlier"
    folder.mkdir()
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    if not (folder / SCRIPT).is_file():
        pytest.skip(f"{revision} has no {SCRIPT}")
    return folder


def read_protocol(release: Path) -> int:
    file = release / "schemas/fleetbus_schemas/protocol.py"
    found = re.search(r"^PROTOCOL = (\d+)", file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(found[1]) if found else UNNUMBERED


class Fleet:
    """The processes of one run, each of some release."""

    def __init__(self, url: str, folder: Path, bus: Bus) -> None:
        self.bus, self.folder = bus, folder
        self._config = folder / "config.json"
        tables = {
            "run": {"name": "default", "folder": str(folder / "runs")},
            "nats": {"url": url},
            "learner": {"steps": STEPS, "groups": 2, "group_size": 2, "checkpoint_every": 2},
            "evaluation": {"episodes": 0},
        }
        self._config.write_text(json.dumps(tables))
        self._processes: dict[str, anyio.abc.Process] = {}

    def _line(self, release: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
        places = os.pathsep.join(str(release / name) for name in ("", "schemas", "workers"))
        return [sys.executable, str(release / SCRIPT), *arguments], os.environ | {"PYTHONPATH": places}

    async def declare(self, release: Path) -> None:
        line, environment = self._line(release, "init", "--config", str(self._config))
        ended = await anyio.run_process(line, env=environment, cwd=self.folder, check=False, stderr=subprocess.STDOUT)
        assert ended.returncode == 0, ended.stdout.decode()

    async def start(self, release: Path, role: str, name: str) -> None:
        line, environment = self._line(release, "role", role, name, str(self._config))
        with (self.folder / f"{name}.log").open("wb") as out:
            self._processes[name] = await anyio.open_process(line, env=environment, cwd=self.folder, stdout=out, stderr=out)

    async def stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, self.read(name)

    def read(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    async def heard(self, name: str, line: str) -> None:
        while line not in self.read(name):  # a file of another process
            assert self._processes[name].returncode is None, self.read(name)
            await anyio.sleep(0.05)

    async def ended(self, name: str) -> None:
        """Wait for a process that ends by itself."""
        assert await self._processes.pop(name).wait() == 0, self.read(name)

    async def until_step(self, more: int) -> int:
        """The number of the step that is ``more`` behind those that are trained now."""
        steps = [each.step async for each in self._steps(follow=False)]
        wanted = min(max(steps, default=0) + more, STEPS)
        async for each in self._steps(follow=True):
            if each.step >= wanted:
                break
        return wanted

    async def _steps(self, *, follow: bool) -> AsyncIterator[StepTrained]:
        if follow:
            async with self.bus.read([TRAIN]) as reader:
                while True:
                    for _, step in decode_entries(StepTrained, [await reader.receive()], beside=ENTRIES):
                        yield step
        else:
            entries = [entry async for entry in self.bus.scan([TRAIN])]
            for _, step in decode_entries(StepTrained, entries, beside=ENTRIES):
                yield step

    async def close(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.aclose()


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with run_server(folder / "nats") as server, connect(server.url, run="default", worker="test") as bus:
        made = Fleet(server.url, folder, bus)
        try:
            with anyio.fail_after(300):
                yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.close()


async def test_a_run_is_brought_to_this_release_while_it_trains(earlier: Path, tmp_path: Path) -> None:
    async with fleet(tmp_path) as run:
        await run.declare(earlier)
        for role in ROLES:
            await run.start(earlier, role, f"{role}-0")
        await run.until_step(STEPS_BETWEEN)
        if read_protocol(earlier) == PROTOCOL:
            for role in ROLES:
                await run.start(ROOT, role, f"{role}-1")
                await run.heard(f"{role}-1", "lineage started" if role == "learner" else "ready")
                await (run.ended(f"{role}-0") if role == "learner" else run.stop(f"{role}-0"))
                await run.until_step(STEPS_BETWEEN)
        else:
            for role in ROLES:
                await run.start(ROOT, role, f"{role}-1")
                await run.heard(f"{role}-1", "too new")
                await run.until_step(1)
            for role in ROLES:
                await run.stop(f"{role}-0")
            await run.declare(ROOT)
        assert await run.until_step(STEPS) == STEPS
        await run.ended("learner-1")
        report = await audit_run(run.bus, Subjects("default"))
    assert report.balanced, report.findings
    assert "lost" not in {finding.kind for finding in report.findings}
