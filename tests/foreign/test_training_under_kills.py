"""Environments of other packages are trained for five steps by `fleetbus up` while its workers are killed: none of their
episodes is lost or doubled. ``just test-foreign`` makes the interpreters."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FLEETBUS = [sys.executable, "-m", "fleetbus"]
STEPS, GROUPS, GROUP_SIZE = 5, 2, 4
KILL_SECONDS = 20.0
"""Between two kills: a worker loads its package again in that time, on two cores."""

VICTIMS = ("environment-0", "environment-1", "inference", "environment-0", "environment-1", "learner")
"""In turn. More environment workers than others: theirs are the packages."""

NAMES = ("verifiers", "verifiers-v0", "inspect")
V1, V0, INSPECT = (ROOT / f".venv-{name}" / "bin/python" for name in NAMES)
CASES = {
    "tool_test": (V0, "verifiers:tool_test"),
    "kuhn_poker": (V1, "verifiers:kuhn_poker player0.harness.id=null player1.harness.id=null"),
    "scratchpad": (V1, "verifiers:scratchpad agent.harness.id=null"),
    "inspect_sums": (INSPECT, f"inspect:{HERE}/inspect_tasks/small.py@sums"),
}

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", CASES)
async def test_an_environment_of_another_package_is_trained_under_kills(name: str, tmp_path: Path) -> None:
    python, spec = CASES[name]
    options = ["--environment-python", str(python)]
    run_here(tmp_path, *FLEETBUS, "tasks", "import", spec, *options)
    sizes = ["--steps", f"{STEPS}", "--learner-groups", f"{GROUPS}", "--learner-group-size", f"{GROUP_SIZE}"]
    command = [*FLEETBUS, "up", "--run", "killed", "--environment", spec, *options, "--tasks", "tasks.json", *sizes]
    command += ["--environment-workers", "2", "--evaluation-episodes", "0", "--no-monitor"]
    with (tmp_path / "up.log").open("wb") as said:
        up = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)  # noqa: ASYNC220 - it starts at once
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(kill_in_turn, psutil.Process(up.pid))
                with anyio.fail_after(600):
                    while up.poll() is None:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
                group.cancel_scope.cancel()
        finally:
            up.terminate()
            up.wait(60)
    assert up.returncode == 0, (tmp_path / "up.log").read_text()
    audit = json.loads(run_here(tmp_path, *FLEETBUS, "audit", "killed", "--deep", "--json"))
    print(name, audit)
    assert audit["balanced"]


def run_here(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def kill_in_turn(up: psutil.Process) -> None:
    """Every `KILL_SECONDS` the next of `VICTIMS`, with ``kill -9``."""
    for victim in itertools.cycle(VICTIMS):
        await anyio.sleep(KILL_SECONDS)
        role, _, number = victim.partition("-")
        with suppress(psutil.NoSuchProcess, IndexError):
            workers = [child for child in up.children() if f"fleetbus_workers.cli {role} " in " ".join(child.cmdline())]
            workers[int(number or 0)].kill()
