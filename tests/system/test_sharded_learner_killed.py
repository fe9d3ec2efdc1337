"""`fleetbus up` with a model shared by two processes: one of them is killed, and the run goes on from its last checkpoint."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_SECONDS = 600
SETTINGS = (
    *("--learner-steps", "8", "--learner-checkpoint-every", "2", "--learner-groups", "2", "--learner-group-size", "4"),
    *("--trainer-processes", "2", "--evaluation-episodes", "0"),
)


def find_rank(up: subprocess.Popen[bytes], rank: str) -> psutil.Process | None:
    for process in psutil.Process(up.pid).children(recursive=True):
        try:
            if "fleetbus_workers.cli" in process.cmdline() and process.environ().get("RANK") == rank:
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_process_of_a_shared_model_costs_the_steps_since_the_checkpoint(tmp_path: Path, rank: str) -> None:
    program = [sys.executable, "-m", "fleetbus_workers.cli"]
    up = subprocess.Popen([*program, "up", "--run", "killed", *SETTINGS], cwd=tmp_path)
    checkpoints = tmp_path / ".fleetbus/runs/killed/checkpoints"
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while not list(checkpoints.glob("l*-000002")):
            assert up.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        while (victim := find_rank(up, rank)) is None:
            assert up.poll() is None and time.monotonic() < deadline
        victim.kill()
        assert up.wait(deadline - time.monotonic()) == 0
    finally:
        if up.poll() is None:
            up.terminate()
            up.wait(60)
    audited = subprocess.run([*program, "audit", "killed"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "the audit balances" in audited.stdout and "8 steps" in audited.stdout
