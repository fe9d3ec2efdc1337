"""Environments of other packages as `fleetbus up` trains them: each writes its tasks into a folder and gives ``up``'s options.

Servers run as long as the context. ``just test-foreign`` makes the interpreters.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from fleetbus_workers.assembly.model import find_starter_folder
from tests.foreign.test_nemo_gym_servers import read_rows, real_server
from tests.support.ors_process import ors_server

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FLEETBUS = [sys.executable, "-m", "fleetbus"]
NAMES = ("verifiers", "verifiers-v0", "inspect", "bfcl", "tau2")
V1, V0, INSPECT, BFCL, TAU2 = (ROOT / f".venv-{name}" / "bin/python" for name in NAMES)
SUMS = f"inspect:{HERE}/inspect_tasks/small.py@sums"
TASKS = "tasks.json"
LONG = ("--episode-max-turns", "3", "--inference-max-model-len", "32768")
"""Of tasks whose tools are longer than the starter policy's context."""

Case = Callable[[Path], AbstractAsyncContextManager[list[str]]]


def run_here(folder: Path, *command: str, seconds: float = 300) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@asynccontextmanager
async def imported(folder: Path, python: Path, spec: str, *, long: bool = False) -> AsyncIterator[list[str]]:
    """One environment in its own interpreter. With ``long`` the policy is the starter's, told that it holds more tokens."""
    interpreter = ["--environment-python", str(python)]
    run_here(folder, *FLEETBUS, "tasks", "import", spec, *interpreter)
    yield ["--environment", spec, *interpreter, *(["--model", stretch_starter(folder / "long"), *LONG] if long else [])]


@asynccontextmanager
async def letters(folder: Path) -> AsyncIterator[list[str]]:
    """Two versions of verifiers in one run."""
    options, tasks = [], []
    for env, python, words in (("old", V0, "letters_v0"), ("new", V1, "letters_v1 agent.harness.id=null")):
        spec = f"verifiers+python={python}:{HERE}/environments/{words}"
        run_here(folder, *FLEETBUS, "tasks", "import", spec, "--env", env, "--output", f"{env}.json")
        options += ["--environment", f"{env}={spec}"]
        tasks += json.loads((folder / f"{env}.json").read_text())
    (folder / TASKS).write_text(json.dumps(tasks))
    yield options


@asynccontextmanager
async def served(folder: Path, name: str, package: str, *, prompt: str = "auto", own: bool = False) -> AsyncIterator[list[str]]:
    """An environment of a server of the Open Reward Standard; ``own``: with a policy that is built for it."""
    with ors_server(package) as address:
        spec = f"ors:{address}#{name}"
        run_here(folder, *FLEETBUS, "tasks", "import", spec)
        if own:
            build = ["starter", "small", "--environment", spec, "--tasks", TASKS]
            run_here(folder, *FLEETBUS, *build, seconds=3600)
        yield ["--environment", spec, "--environment-prompt", prompt, *(["--model", "small"] if own else [])]


@asynccontextmanager
async def rows(folder: Path, module: str, name: str) -> AsyncIterator[list[str]]:
    """Rows of a resources server of NeMo Gym."""
    async with real_server(module, name) as url:
        tasks = [{"key": f"row-{n}", "prompt": "", "config": {"row": row}} for n, row in enumerate(read_rows(module))]
        (folder / TASKS).write_text(json.dumps(tasks))
        yield ["--environment", f"nemo-gym:{url}"]


def stretch_starter(folder: Path) -> str:
    """A copy of the starter policy that says that it holds 32,768 tokens: it plays, badly."""
    shutil.copytree(find_starter_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return folder.name


CASES: dict[str, Case] = {
    "tool_test": partial(imported, python=V0, spec="verifiers:tool_test"),
    "kuhn_poker": partial(imported, python=V1, spec="verifiers:kuhn_poker player0.harness.id=null player1.harness.id=null"),
    "scratchpad": partial(imported, python=V1, spec="verifiers:scratchpad agent.harness.id=null"),
    "letters": letters,
    "inspect_sums": partial(imported, python=INSPECT, spec=SUMS),
    "inspect_sums_with_a_tool": partial(imported, python=INSPECT, spec=f"{SUMS}_with_a_tool"),
    "bfcl": partial(imported, python=BFCL, spec="bfcl:multi_turn split=train", long=True),
    "tau2_retail": partial(imported, python=TAU2, spec="tau2:retail", long=True),
    "tau2_airline": partial(imported, python=TAU2, spec="tau2:airline", long=True),
    "shelves": partial(served, name="shelves", package="ors", prompt="compact"),
    "order": partial(served, name="order", package="ors", own=True),
    "order_openreward": partial(served, name="order", package="openreward", own=True),
    "nemo_gym_counters": partial(rows, module="example_session_state_mgmt", name="StatefulCounterResourcesServer"),
    "nemo_gym_weather": partial(rows, module="example_single_tool_call", name="SimpleWeatherResourcesServer"),
}
