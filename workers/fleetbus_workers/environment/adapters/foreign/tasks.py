"""The tasks of an environment of another package, as fleetbus reads them: asked of the package, in its interpreter."""

import json
import subprocess
import tempfile
from typing import Any, NamedTuple

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.foreign.factory import build_command

SECONDS = 600.0
"""How long the package may take to be imported and to load its data."""


class Listed(NamedTuple):
    """Tasks as they stand in a tasks file, and what they are of: ``package``, ``version`` and ``digest``, if it says so."""

    tasks: list[dict[str, Any]]
    source: dict[str, str]


def list_tasks(spec: str, python: str, count: int, *, env: str = "") -> Listed:
    """The first ``count`` tasks, in the package's order; ``env`` replaces their environment keys. Raises `UserError`."""
    command = build_command(spec, python, "--list", str(count))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"environment {spec!r} did not list its tasks within {SECONDS:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"environment {spec!r} cannot be loaded: {said[-1] if said else f'exit status {done.returncode}'}")
    listed = json.loads(done.stdout.splitlines()[-1])
    name = spec.partition(":")[2].split()[0].rstrip("/").rpartition("/")[2]
    return Listed([build_entry(name, task) | ({"env_key": env} if env else {}) for task in listed["tasks"]], listed["source"])


def build_entry(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """A task by its place in the package's data, or as the package itself keys it."""
    if "key" not in task:
        return {"key": f"{name}-{task['index']}", "prompt": task["prompt"], "config": {"index": task["index"]}}
    return {"key": task["key"], "env_key": task["env"], "prompt": task["prompt"], "config": task["config"]}
