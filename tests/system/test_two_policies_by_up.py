"""One command trains two policies: a learner and an inference worker for each, two models, one end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.called_command import call

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "proposer.py"
SMALL = ("--learner-groups", "1", "--learner-group-size", "4", "--evaluation-episodes", "2", "--no-monitor")


def test_a_proposer_and_a_solver_are_trained_further_and_forked_together(tmp_path: Path) -> None:
    played = ("--environment", f"{EXAMPLE}:Spelling", "--tasks", str(EXAMPLE.with_suffix(".json")), "--seat", "solver=train")
    shown = call(tmp_path, "up", *played, "--episode-max-tokens", "10", "--steps", "2", *SMALL)
    assert "learner-solver is ready" in shown and "inference-solver is ready" in shown
    assert "solver: step 2/2" in shown and "solver: 2 steps" in shown
    run = tmp_path / ".fleetbus/runs/default"
    models = [run / "model", run / "policies/solver/model"]
    weights = [(model / "model.safetensors").read_bytes() for model in models]
    assert weights[0] != weights[1]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["policies"]["solver"]["steps"] == [1, 2]
    assert "is finished" in call(tmp_path, "up")
    assert "2 of 2 graded" in call(tmp_path, "evaluate", "default", "--episodes", "2")
    assert "solver: step 3/3" in call(tmp_path, "up", "--steps", "3", "--no-monitor")
    call(tmp_path, "fork", "default", "--run", "other")
    assert "solver: step 1/1" in call(tmp_path, "up", "--run", "other", "--steps", "1", "--no-monitor")
