"""`fleetbus up` with keys, two trainer processes and two engines: versions come from the learner while they are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    *("--run", "sent", "--nats-auth", "keys", "--no-monitor", "--weights-transfer", "collective"),
    *("--trainer-processes", "2", "--inference-workers", "2"),
    *("--learner-steps", "4", "--learner-groups", "2", "--learner-group-size", "4", "--evaluation-episodes", "0"),
)


def test_engines_of_a_run_with_keys_take_versions_from_two_trainer_processes(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "fleetbus_workers.cli"]
    subprocess.run([*program, "auth", "init", "keys", "--run", "sent"], cwd=tmp_path, check=True, capture_output=True)
    ended = subprocess.run([*program, "up", *SETTINGS], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    logs = tmp_path / ".fleetbus/runs/sent/logs"
    assert "weights sent" in (logs / "learner.log").read_text()
    # The last version may come when the run is over, and the first before the learner has heard of anybody.
    taken = [(logs / f"inference-{index}.log").read_text().count("weights taken from the learner") for index in (0, 1)]
    assert min(taken) >= 1, taken
    audit = [*program, "audit", "sent", "--nats-auth", "keys"]
    audited = subprocess.run(audit, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "the audit balances" in audited.stdout and "4 steps" in audited.stdout
