"""A worker of `up` that hangs, as real processes: it is killed and started again, and the run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WITHIN_SECONDS = 120
COMMAND = ("up", "--no-monitor", "--evaluation-episodes", "0", "--limits-silent-worker", "12")


def wait_until(condition: Callable[[], bool]) -> None:
    """Other processes make it true: only polling can see it."""
    until = time.monotonic() + WITHIN_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_worker_that_stands_still_is_killed_and_started_again(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as output:
        running = subprocess.Popen([sys.executable, "-m", "fleetbus", *COMMAND], cwd=tmp_path, stdout=output, stderr=output)
    try:
        wait_until(lambda: "step 1/" in said.read_text())
        workers = psutil.Process(running.pid).children(recursive=True)
        hanging = next(worker for worker in workers if "environment" in worker.cmdline())
        hanging.suspend()
        wait_until(lambda: "environment-1 is ready" in said.read_text())
        assert "environment hangs, and is killed: what it was at is done again" in said.read_text()
        assert not hanging.is_running()
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
