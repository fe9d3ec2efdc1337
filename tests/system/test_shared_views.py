"""The page stays open before, during and after a run, and all that looks at a run shares its files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.config.settings import Configuration
from fleetbus_workers.cli.train import up_page
from tests.support.processes import until

ROLES = [sys.executable, str(Path(__file__).with_name("scripted_roles.py"))]
FLEETBUS = [sys.executable, "-m", "fleetbus_workers.cli"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.integration]


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
    monitor = await anyio.open_process(
        [*FLEETBUS, "monitor", "--no-key", "--port", "0"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
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
        assert await shows_episode(), "a transcript waits until the files are served again"
        await wait_for(steps, 4)
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


@pytest.mark.parametrize("visited", [True, False])
async def test_up_serves_a_page_of_its_run_from_its_first_visit_on(tmp_path: Path, visited: bool) -> None:
    command = [*ROLES, "up", "--steps", "1000"]
    async with await anyio.open_process(command, cwd=tmp_path, stderr=None, env={**os.environ, "SCRIPT": "wait"}) as up:
        assert up.stdout is not None
        lines = BufferedByteReceiveStream(up.stdout)
        with anyio.fail_after(100):
            while not (line := (await lines.receive_until(b"\n", 1 << 16)).decode()).startswith("page: "):
                pass
            address = line.split()[1]
            if visited:
                base, _, key = address.partition("?key=")
                status, overview = await anyio.to_thread.run_sync(fetch, f"{base}api/overview?key={key}")
                assert (status, overview["run"]) == (200, "default")
                assert (await anyio.to_thread.run_sync(fetch, f"{base}api/overview"))[0] == 401
            up.send_signal(signal.SIGINT)
            assert await up.wait() == 130
    with contextlib.suppress(urllib.error.URLError):  # unless the page of another run has taken the port in the meantime
        assert fetch(address)[0] == 401
    await until(lambda: not [each for each in psutil.process_iter() if _is_in(each, tmp_path)])


async def test_up_serves_no_page_where_none_is_wanted_and_another_one_has_the_port(tmp_path: Path) -> None:
    taken: list[socket.socket] = []

    def take() -> bool:
        with contextlib.suppress(OSError):  # another test has it for now
            taken.append(socket.create_server(("127.0.0.1", 8450)))
        return bool(taken)

    await until(take)
    with taken[0]:
        assert "page: http://127.0.0.1:" in (served := await run(tmp_path, *ROLES, "up", "--steps", "2"))
        assert ":8450/" not in served
    assert "page: " not in await run(tmp_path, *ROLES, "up", "--steps", "2", "--fresh", "--no-monitor")


async def test_a_page_that_fails_is_named_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("no page")

    monkeypatch.setattr(up_page, "_serve", fail)
    shown: list[str] = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(up_page.serve_page, Configuration(), shown.append, anyio.Event())
            await until(lambda: bool(shown))
            address = urllib.parse.urlsplit(shown[0].split()[1])
            async with await anyio.connect_tcp(str(address.hostname), int(str(address.port))):
                await until(lambda: len(shown) == 2)
    assert shown[1] == "page stopped: ValueError: no page; `fleetbus monitor default` serves it"
