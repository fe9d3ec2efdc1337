"""One command of the program, in a process of its own, to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 250


def call(folder: Path, *arguments: str, status: int = 0) -> str:
    """All that the command wrote, run in ``folder`` without settings from variables; ``status`` is its exit code."""
    command = [sys.executable, "-m", "fleetbus_workers.cli", *arguments]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
