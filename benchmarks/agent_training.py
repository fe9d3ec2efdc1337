"""Agents of four SDKs, one for each dialect, their own loops unmodified, trained through `fleetbus gateway agents`.

    AGENTS_PYTHON=.venv-agents/bin/python python benchmarks/agent_training.py --json     # after `just test-agents`

A process of the SDK plays the warehouse over its MCP server, many sessions at a time, and knows nothing of fleetbus but the URL
that its episodes come from; `fleetbus up` trains the starter policy on what it did. The run is then proven by `audit --deep`.
``success_*`` are of held-out tasks, ``max_logprob_difference`` is the largest of a step between sampler and trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks
from fleetbus_workers.serving.listeners import bind

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "tests" / "agents" / "gateway_clients.py"
CLIENTS = ("langgraph", "openai_agents", "anthropic", "google_genai")
"""Chat Completions, Responses, Messages, Gemini."""
RUN = "agents"
READY_SECONDS = 60


@contextmanager
def started(command: list[str], folder: Path, name: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the length of the body; what it says is in ``NAME.log``."""
    with (folder / f"{name}.log").open("wb") as said:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | variables, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def train(client: str, python: str, folder: Path, *, steps: int, held_out: int, groups: int, sessions: int) -> dict[str, Any]:
    """One run from the starter policy."""
    tasks = [{"key": task.key, "prompt": task.prompt, "seed": task.seed} for task in build_train_tasks(600, seed=5)]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    fleetbus = [sys.executable, "-m", "fleetbus"]
    options = ["--tasks", "tasks.json", "--steps", f"{steps}", "--evaluation-episodes", f"{held_out}", "--no-monitor"]
    up = [*fleetbus, "up", "--run", RUN, "--environment-workers", "0", "--learner-groups", f"{groups}", *options]
    gateway = [*fleetbus, "gateway", "agents", "--run", RUN, "--port", f"{port}"]
    player = [python, str(CLIENT), client, f"http://127.0.0.1:{port}", f"{sessions}"]
    paths = os.pathsep.join(str(ROOT / each) for each in (".", "workers", "schemas"))
    begun = time.monotonic()
    with started(up, folder, "up") as learner:
        wait_for(folder / ".fleetbus" / "runs" / RUN / "server.json")
        with started(gateway, folder, "gateway"), started(player, folder, "client", PYTHONPATH=paths):
            if learner.wait() != 0:
                raise SystemExit((folder / "up.log").read_text() + (folder / "client.log").read_text()[-2000:])
    seconds = time.monotonic() - begun
    audit = subprocess.run([*fleetbus, "audit", RUN, "--deep"], cwd=folder, capture_output=True, text=True)
    if audit.returncode != 0:
        raise SystemExit(audit.stdout + audit.stderr)
    summary = json.loads((folder / ".fleetbus" / "runs" / RUN / "summary.json").read_text())
    return {
        "client": client,
        "steps": steps,
        "episodes_trained": summary["episodes_trained"],
        "success_start": summary["success_start"],
        "success_end": summary["success_end"],
        "success_end_greedy": summary.get("success_end_greedy"),
        "seconds": round(seconds, 1),
        "audit_deep": "balanced",
        **{name: value for name, value in summary.items() if "difference" in name},
    }


def wait_for(file: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while not file.is_file():
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not appear")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--held-out", type=int, default=64, help="held-out episodes per evaluation")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 episodes per step")
    parser.add_argument("--sessions", type=int, default=64, help="sessions that a client plays at a time")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    named = os.environ.get("AGENTS_PYTHON") or sys.exit("AGENTS_PYTHON names no Python with the clients: `just test-agents`")
    python = str(Path(named).absolute())
    sizes = {"steps": given.steps, "held_out": given.held_out, "groups": given.groups, "sessions": given.sessions}
    for client in given.clients:
        with tempfile.TemporaryDirectory(prefix="fleetbus-agent-training-") as folder:
            figures = train(client, python, Path(folder), **sizes)
        print(json.dumps(figures) if given.json else figures, flush=True)


if __name__ == "__main__":
    main()
