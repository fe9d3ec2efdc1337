"""One command trains a policy beside a simulated customer that a server of chat completions plays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.opponent_server import run_opponent
from tests.support.called_command import call

pytestmark = [pytest.mark.timeout(200), pytest.mark.integration]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "customer.py"


def test_a_customer_behind_a_url_is_recorded_and_never_trained(tmp_path: Path) -> None:
    small = ("--learner-groups", "1", "--learner-group-size", "4", "--evaluation-episodes", "4", "--no-monitor")
    with run_opponent(seed=1) as server:
        seat = f"customer=its-model@{server.url}"
        played = ("--environment", f"{EXAMPLE}:Desk", "--tasks", str(EXAMPLE.with_suffix(".json")), "--seat", seat)
        shown = call(tmp_path, "up", *played, "--steps", "1", *small)
        assert "2 of 2 graded" in call(tmp_path, "evaluate", "default", "--episodes", "2")
    assert "inference-customer is ready" in shown
    assert "the audit balances" in call(tmp_path, "audit", "default", "--deep")
    call(tmp_path, "record", "--run", "default", "--output", "run.fbrec")
    listed = call(tmp_path, "episodes", "run.fbrec", "--split", "train", "--json")
    episode = json.loads(listed)[0]["episode_id"]
    transcript = call(tmp_path, "episodes", "run.fbrec", episode)
    assert "seat customer: no reward (the policy customer plays it, which is not trained here)" in transcript
    assert "replays as recorded" in call(tmp_path, "replay", "run.fbrec", "--role", "learner")
    assert server.answered >= 2 * 4


def test_a_customer_that_nobody_can_reach_ends_the_command_with_its_address(tmp_path: Path) -> None:
    shown = call(tmp_path, "up", "--seat", "customer=http://127.0.0.1:9/v1", "--steps", "1", status=2)
    assert "run.seats: nothing answers at http://127.0.0.1:9/v1" in shown
    assert not (tmp_path / ".fleetbus").exists()
