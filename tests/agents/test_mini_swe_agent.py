"""mini-swe-agent plays fleetbus's own Harbor tasks with a scripted policy: `just test-agents`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.tasks.files import load_dataset
from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.canned import CannedSampler
from tests.agents.gateway_support import SUBJECTS, find_port, running
from tests.support.processes import children, until

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "docs" / "examples" / "harbor"
PLAYER = Path(__file__).with_name("mini_swe_player.py")
UP = Path(__file__).with_name("canned_up.py")
PATHS = os.pathsep.join(str(ROOT / each) for each in (".", "workers", "schemas"))
PYTHON = os.environ.get("AGENTS_PYTHON", "")
EPISODES = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`"),
]


def call(command: str) -> str:
    return "I do it.\n<tool_call>" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "</tool_call>"


def list_left() -> set[str]:
    """Boxes and what verifiers made, and mounts, of this machine."""
    names = ("fleetbus-sandbox-*", "fleetbus-harbor-*", "fleetbus-artifacts-*")
    folders = {str(path) for name in names for path in Path(tempfile.gettempdir()).glob(name)}
    return folders | {line for line in Path("/proc/self/mounts").read_text().splitlines() if "fleetbus" in line}


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.parametrize("name", ["log-report", "repair-inventory", "roman-numerals"])
async def test_mini_swe_agent_solves_a_task_in_its_box_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    task = next(task for task in load_dataset(f"harbor:{TASKS}") if task.key.endswith(name))
    solutions = sorted((TASKS / name).rglob("solve.sh"))
    texts = [text for solution in solutions for text in (call("ls"), call(solution.read_text()), SUBMIT)]
    before = list_left()
    sampler = CannedSampler(*texts)
    async with running(tmp_path, sampler, sampler.template) as run, run.gateway() as client:
        for episode in range(EPISODES):
            await run.request(f"e{episode}", task=task, max_tokens=1 << 17, sampling=SamplingSettings(max_tokens=1 << 14))
        command = [PYTHON, str(PLAYER), str(client.base_url), str(TASKS), str(EPISODES), "1"]
        with (tmp_path / "player.log").open("wb") as said, anyio.fail_after(600):
            variables = os.environ | {"PYTHONPATH": PATHS}
            done = await anyio.run_process(command, stdout=said, stderr=said, env=variables, check=False)
        said_text = (tmp_path / "player.log").read_text()
        assert done.returncode == 0, said_text[-3000:]
        results = [await run.result(f"e{episode}") for episode in range(EPISODES)]
        report = await audit_run(run.bus, SUBJECTS)
    assert report.balanced, report.findings
    assert [(result.outcome, result.reward) for result in results] == [("completed", 1.0)] * EPISODES, said_text
    assert all(len(result.segments or (0,)) == len(solutions) for result in results), "a conversation per step"
    await until(lambda: not children() and list_left() <= before)  # what others make beside it goes, too


def build_texts() -> list[str]:
    """What solves each of the tasks: a shell knows its box by its files. A task of two steps takes all six texts."""
    solutions = {
        name: sorted((TASKS / name).rglob("solve.sh")) for name in ("log-report", "repair-inventory", "roman-numerals")
    }
    report, repair, roman = ([each.read_text() for each in solutions[name]] for name in solutions)
    choices = (f"[ -f service.log ]; then\n{report[0]}", f"[ -d inventory ]; then\n{repair[0]}", f"true; then\n{roman[0]}")
    chosen = "if " + "\nelif ".join(choices) + "\nfi"
    return [call("ls"), call(chosen), SUBMIT, call("ls"), call(report[1]), SUBMIT]


async def test_fifty_episodes_of_a_run_leave_nothing_behind(tmp_path: Path) -> None:
    before = list_left()
    (tmp_path / "texts.json").write_text(json.dumps(build_texts()))
    variables = os.environ | {"PYTHONPATH": PATHS, "CANNED_TEXTS": str(tmp_path / "texts.json"), "PYTHONFAULTHANDLER": "1"}
    port = find_port()
    options = ["--run", "fifty", "--tasks", f"harbor:{TASKS}", "--no-monitor", "--environment-workers", "0", "--steps", "2"]
    options += ["--no-evaluation-greedy-start"]  # 6 + 32 + 6 + 6 episodes
    sizes = {"learner-groups": 4, "learner-group-size": 4, "evaluation-episodes": 6, "episode-max-turns": 20}
    sizes |= {"episode-max-episode-tokens": 1 << 17, "episode-max-tokens": 1 << 14, "inference-max-model-len": 1 << 17}
    options += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    up = [sys.executable, str(UP), "up", *options]
    gateway = [sys.executable, "-m", "fleetbus", "gateway", "agents", "--run", "fifty", "--port", str(port)]
    player = [PYTHON, str(PLAYER), f"http://127.0.0.1:{port}", str(TASKS), "50", "4"]
    with anyio.fail_after(800), started(up, tmp_path, variables) as learner:
        await until(lambda: (tmp_path / ".fleetbus/runs/fifty/server.json").is_file())
        with started(gateway, tmp_path, variables), started(player, tmp_path, variables) as playing:
            assert await anyio.to_thread.run_sync(playing.wait, abandon_on_cancel=True) == 0, read_logs(tmp_path)
            assert await anyio.to_thread.run_sync(learner.wait, abandon_on_cancel=True) == 0, read_logs(tmp_path)
    audit = [sys.executable, "-m", "fleetbus", "audit", "fifty"]
    audited = await anyio.run_process(audit, cwd=tmp_path, check=False)
    assert audited.returncode == 0, audited.stdout.decode()
    summary = json.loads((tmp_path / ".fleetbus/runs/fifty/summary.json").read_text())
    print({name: summary[name] for name in ("episodes_trained", "success_start", "success_end", "success_end_greedy")})
    assert (summary["episodes_trained"], summary["success_end"], summary["success_end_greedy"]) == (32, 1.0, 1.0)
    await until(lambda: not children() and list_left() <= before)


@contextmanager
def started(command: list[str], folder: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the length of the body; what it says is appended to ``said.log``."""
    with (folder / "said.log").open("ab") as said:
        with subprocess.Popen(command, cwd=folder, env=variables, stdout=said, stderr=said) as process:
            try:
                yield process
            finally:
                process.terminate()


def read_logs(folder: Path) -> str:
    return (folder / "said.log").read_text()[-4000:]
