"""Agents with their own loops train for real: `just test-agents` runs them with the clients that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks

AGENT = Path(__file__).with_name("warehouse_agent.py")
PYTHON = os.environ.get("AGENTS_PYTHON", "")
"""A Python that has the clients' packages and fleetbus."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train(folder: Path, python: str, client: str, *, steps: int, held_out: int) -> tuple[float, float]:
    """Success on held-out tasks before and after."""
    tasks = [{"key": task.key, "prompt": task.prompt, "seed": task.seed} for task in build_train_tasks(600, seed=5)]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run = [sys.executable, "-m", "fleetbus", "up", "--run", "agents", "--environment", f"agent:{python} {AGENT}"]
    settings = ["--tasks", "tasks.json", "--steps", f"{steps}", "--evaluation-episodes", f"{held_out}", "--learner-groups", "8"]
    done = subprocess.run(
        [*run, *settings, "--environment-pass-variables", "AGENT_CLIENT", "--environment-agent-reward-url"],
        cwd=folder,
        env=os.environ | {"AGENT_CLIENT": client},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    audit = subprocess.run([sys.executable, "-m", "fleetbus", "audit", "agents", "--deep"], cwd=folder, capture_output=True)
    assert audit.returncode == 0, audit.stdout.decode()
    summary = json.loads((folder / ".fleetbus" / "runs" / "agents" / "summary.json").read_text())
    return summary["success_start"], summary["success_end"]


def test_an_agent_without_any_package_learns(tmp_path: Path) -> None:
    start, end = train(tmp_path, sys.executable, "urllib", steps=30, held_out=64)
    assert end >= start + 0.3


@pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`")
@pytest.mark.parametrize("client", ["openai", "anthropic", "litellm"])
def test_a_clients_own_loop_plays_episodes_that_are_trained(tmp_path: Path, client: str) -> None:
    start, end = train(tmp_path, PYTHON, client, steps=2, held_out=16)
    assert start > 0 or end > 0, "some of the starter policy's episodes succeed"
