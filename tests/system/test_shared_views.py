"""The page stays open before, during and after a run, and all that looks at a run shares its files."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from tests.support.processes import until

ROLES = [sys.executable, str(Path(__file__).with_name("scripted_roles.py"))]
FLEETBUS = [sys.executable, "-m", "fleetbus_workers.cli"]
pytestmark = pytest.mark.timeout(300)


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], cwd=folder, capture_output=True, text=True, timeout=100, check=False)


async def run(folder: Path, *command: str) -> str:
    """The command's output; it has to end well."""
    done = await anyio.to_thread.run_sync(call, folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetch(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_the_page_outlives_its_run_and_keeps_nothing_from_others(tmp_path: Path) -> None:
    await run(tmp_path, *ROLES, "up", "--steps", "2")
    monitor = await anyio.open_process([*FLEETBUS, "monitor", "--port", "0"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        assert monitor.stdout is not None
        address = (await monitor.stdout.receive()).decode().split()[-1]

        async def steps() -> int:
            status, overview = await anyio.to_thread.run_sync(fetch, f"{address}api/overview")
            return int(overview["numbers"]["step"]) if status == 200 else -1

        async def shows_episode() -> bool:
            return (await anyio.to_thread.run_sync(fetch, f"{address}api/episodes/e0"))[0] == 200

        async def wait_for(condition: Any, wanted: Any) -> None:
            with anyio.fail_after(60):
                while await condition() != wanted:  # noqa: ASYNC110
                    await anyio.sleep(0.1)

        await wait_for(steps, 2)
        assert await shows_episode()
        assert "e0" in await run(tmp_path, *FLEETBUS, "episodes")
        await run(tmp_path, *FLEETBUS, "record", "default", "-o", "run.fbrec")
        await anyio.to_thread.run_sync(functools.partial(call, tmp_path, *FLEETBUS, "audit"))
        assert await shows_episode(), "another viewer took the server along"
        assert "4 steps" in await run(tmp_path, *ROLES, "up", "--steps", "4")
        await wait_for(steps, 4)
        await wait_for(shows_episode, True)
        assert "e0" in await run(tmp_path, *FLEETBUS, "episodes")
        monitor.send_signal(signal.SIGTERM)
        with anyio.fail_after(30):
            assert await monitor.wait() == 0
    finally:
        with anyio.CancelScope(shield=True):
            if monitor.returncode is None:
                monitor.kill()
            await monitor.aclose()
    await until(lambda: not [each for each in psutil.process_iter() if _is_in(each, tmp_path)])


def _is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in word for word in process.cmdline())
    except psutil.Error:
        return False
