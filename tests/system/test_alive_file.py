"""The file by which a container's probe sees that a role lives: the very commands of the manifests, on a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog.testing

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_workers.command import alive_file
from fleetbus_workers.command.alive_file import touch_regularly

yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/environment.yaml"
RUN = "alive"


def probe(name: str, file: Path) -> int:
    """The exit status of a probe of the manifest, with another file in place of the container's."""
    manifest: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    command = [word.replace("/tmp/alive", str(file)) for word in container[name]["exec"]["command"]]
    return subprocess.run(command, check=False, timeout=10).returncode


@pytest.mark.integration
async def test_probes_fail_before_a_worker_is_there_pass_while_it_waits_for_its_server_and_fail_once_it_hangs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "alive"
    file.touch()
    os.utime(file, (0, 0))  # of a container that was started again
    assert probe("startupProbe", file) != 0
    with anyio.fail_after(50):
        async with run_server(tmp_path / "nats") as server:
            async with connect(server.url, run=RUN, role="init") as bus:
                await bus.declare(plan_run(RUN, lanes=1, max_bytes=1 << 20))
            command = [sys.executable, "-m", "fleetbus", "environment", "--run", RUN, "--nats", server.url]
            options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            async with await anyio.open_process([*command, "--log-alive", str(file)], **options) as worker:
                while probe("startupProbe", file):  # noqa: ASYNC110  # another process's
                    await anyio.sleep(0.1)
                await server.kill()
                before = file.stat().st_mtime
                while file.stat().st_mtime == before:  # noqa: ASYNC110  # another process's
                    await anyio.sleep(0.1)
                assert probe("livenessProbe", file) == 0, "a worker whose server is away was started again"
                worker.send_signal(signal.SIGSTOP)
                long_ago = time.time() - 3600
                os.utime(file, (long_ago, long_ago))
                assert probe("livenessProbe", file) != 0
                worker.kill()


async def test_a_file_that_cannot_be_written_is_bad_input_at_the_start_and_one_line_later_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive_file, "TOUCH_SECONDS", 0.01)
    with pytest.raises(UserError, match=r"cannot write log\.alive"):
        await touch_regularly(tmp_path / "absent" / "alive")
    folder = tmp_path / "folder"
    folder.mkdir()
    with structlog.testing.capture_logs() as logged:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(touch_regularly, folder / "alive")
            await anyio.sleep(0.05)
            (folder / "alive").unlink()
            folder.rmdir()
            await anyio.sleep(0.1)
            folder.mkdir()
            while not (folder / "alive").exists():  # noqa: ASYNC110  # the other task's
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert [line["log_level"] for line in logged] == ["warning"]
