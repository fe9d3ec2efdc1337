"""mini-swe-agent plays fleetbus's own Harbor tasks with a scripted policy: `just test-agents`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import anyio
import pytest

from fleetbus.audit import audit_run
from fleetbus.tasks import load_dataset
from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.canned import CannedSampler
from tests.agents.gateway_support import SUBJECTS, running
from tests.support.processes import children

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "docs" / "examples" / "harbor"
PLAYER = Path(__file__).with_name("mini_swe_player.py")
PYTHON = os.environ.get("AGENTS_PYTHON", "")
EPISODES = int(os.environ.get("MINI_SWE_EPISODES", "2"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`"),
]


def call(command: str) -> str:
    return "I do it.\n<tool_call>" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "</tool_call>"


def list_folders() -> set[Path]:
    """Boxes and what verifiers made, of this machine."""
    names = ("fleetbus-sandbox-*", "fleetbus-harbor-*", "fleetbus-artifacts-*", "fleetbus-agent-*_*")
    return {path for name in names for path in Path(tempfile.gettempdir()).glob(name)}


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.parametrize("name", ["log-report", "repair-inventory", "roman-numerals"])
async def test_mini_swe_agent_solves_a_task_in_its_box_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    task = next(task for task in load_dataset(f"harbor:{TASKS}") if task.key.endswith(name))
    solutions = sorted((TASKS / name).rglob("solve.sh"))
    texts = [text for solution in solutions for text in (call("ls"), call(solution.read_text()), SUBMIT)]
    before = list_folders()
    paths = os.pathsep.join(str(ROOT / each) for each in (".", "workers", "schemas"))
    sampler = CannedSampler(*texts)
    async with running(tmp_path, sampler, sampler.template) as run, run.gateway() as client:
        for episode in range(EPISODES):
            await run.request(f"e{episode}", task=task, max_tokens=1 << 17, sampling=SamplingSettings(max_tokens=1 << 14))
        command = [PYTHON, str(PLAYER), str(client.base_url), str(TASKS), str(EPISODES)]
        with (tmp_path / "player.log").open("wb") as said, anyio.fail_after(600):
            variables = os.environ | {"PYTHONPATH": paths}
            done = await anyio.run_process(command, stdout=said, stderr=said, env=variables, check=False)
        said_text = (tmp_path / "player.log").read_text()
        assert done.returncode == 0, said_text[-3000:]
        results = [await run.result(f"e{episode}") for episode in range(EPISODES)]
        report = await audit_run(run.bus, SUBJECTS)
    assert report.balanced, report.findings
    assert [(result.outcome, result.reward) for result in results] == [("completed", 1.0)] * EPISODES, said_text
    assert all(len(result.segments or (0,)) == len(solutions) for result in results), "a conversation per step"
    assert not children() and list_folders() <= before
