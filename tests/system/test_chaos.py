"""Real processes under faults for a minute: the audit balances, nothing is lost or trained twice, nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
LIMIT_SECONDS = 400


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_SECONDS + 30)
async def test_a_fleet_of_processes_survives_a_minute_of_faults(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--seed", "1", "--seconds", "40", "--quiet", "20", "--evaluate", "32"]
    with anyio.fail_after(LIMIT_SECONDS):
        done = await anyio.run_process([*command, "--folder", str(tmp_path), "--json"], check=False, stderr=None)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["audit_balanced"], report["audit_findings"]
    assert report["without_outcome"] == 0
    assert report["trained_twice"] == 0
    assert report["left_behind"] == []
    assert report["optimizer_steps"] > 0
    assert set(report["faults"]) == {"environment", "inference", "learner", "server"}


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.timeout(LIMIT_SECONDS + 30)
async def test_segments_of_processes_that_are_killed_are_trained_once(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--segments", "--seed", str(seed), "--seconds", "40", "--quiet", "15"]
    command += ["--evaluate", "0", "--folder", str(tmp_path), "--json"]
    with anyio.fail_after(LIMIT_SECONDS):
        done = await anyio.run_process(command, check=False, stderr=None)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["audit_findings"] == {}
    assert report["proven"] == report["books"]["trained"] > 0
    assert any(int(attempts) > 1 for attempts in report["attempts_per_episode"]), "nothing was struck"
    assert report["episodes"].keys() <= {"completed", "truncated"}, "an episode was lost"


@pytest.mark.chaos
@pytest.mark.parametrize("seats", ["--seats", "--opponent", "--two-learners"])
@pytest.mark.timeout(LIMIT_SECONDS + 30)
async def test_seats_of_processes_that_are_killed_are_trained_once(seats: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), seats, "--seed", "1", "--seconds", "40", "--quiet", "15", "--mean", "1"]
    with anyio.fail_after(LIMIT_SECONDS):
        done = await anyio.run_process([*command, "--folder", str(tmp_path), "--json"], check=False, stderr=None)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["audit_findings"] == {}
    assert report["proven"] == report["books"]["trained"] > 0
    # An episode of proposer and solver takes two turns, and few are struck: there the learners are.
    taken_over = any(int(attempts) > 1 for attempts in report["attempts_per_episode"])
    assert report["lineages"] > 1 if seats == "--two-learners" else taken_over, "nothing was struck"
    assert "2" in report["seats_per_episode"]


@pytest.mark.integration
async def test_a_chaos_run_that_is_told_to_stop_takes_all_its_processes_along(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--seconds", "0"]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=None) as process:
        with anyio.fail_after(30):
            while len(started := psutil.Process(process.pid).children(recursive=True)) < 6:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            process.terminate()
            assert await process.wait() == 130
    assert psutil.wait_procs(started, timeout=5)[1] == []
