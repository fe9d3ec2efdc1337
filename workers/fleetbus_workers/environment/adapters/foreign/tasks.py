"""The tasks of an environment of another package, as fleetbus reads them: asked of the package, in its interpreter."""

import json
import subprocess
import tempfile
from typing import Any

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.foreign.factory import build_command

SECONDS = 600.0
"""How long the package may take to be imported and to load its data."""


def list_tasks(spec: str, python: str, count: int, *, env: str = "") -> list[dict[str, Any]]:
    """The first ``count`` tasks, in the package's order, with ``env`` as their environment key. Raises `UserError`."""
    command = build_command(spec, python, "--list", str(count))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"environment {spec!r} did not list its tasks within {SECONDS:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"environment {spec!r} cannot be loaded: {said[-1] if said else f'exit status {done.returncode}'}")
    name = spec.partition(":")[2].split()[0].rstrip("/").rpartition("/")[2]
    keyed = {"env_key": env} if env else {}
    return [
        {"key": f"{name}-{task['index']}", "prompt": task["prompt"], "config": {"index": task["index"]}} | keyed
        for task in json.loads(done.stdout.splitlines()[-1])
    ]
