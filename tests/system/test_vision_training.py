"""A model that sees, built from nothing, learns what it is shown: `fleetbus up` on the environment `colours`. Minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus_workers.starter.vision_starter import build_vision_starter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TASKS = Path(__file__).parents[2] / "docs" / "examples" / "colours.json"
STEPS = 30
LIMIT_SECONDS = 1200
CLOSE = 1e-4


def test_a_model_that_sees_learns_to_tell_colours(tmp_path: Path) -> None:
    build_vision_starter(tmp_path / "seeing")
    command = [
        sys.executable, "-m", "fleetbus_workers.cli", "up", "--model", str(tmp_path / "seeing"), "--tasks", str(TASKS),
        "--environment", "colours", "--environment-images", "--run", "colours", "--run-folder", str(tmp_path / "runs"),
        "--learner-steps", str(STEPS), "--learner-learning-rate", "0.001", "--evaluation-episodes", "128",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, env=os.environ | {"NO_COLOR": "1"}, capture_output=True)
    summary = json.loads((tmp_path / "runs" / "colours" / "summary.json").read_text())
    rewards = summary["reward_by_step"]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.2, rewards
    assert summary["success_end_greedy"] > summary["success_start"] + 0.3
    assert summary["max_logprob_difference"] < CLOSE
    assert summary["episodes_excluded"] == {}
