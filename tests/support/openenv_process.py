"""The real OpenEnv server as a process of its own Python: where that is, started, and ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("openenv_real.py")


def openenv_python() -> Path | None:
    """The Python that has `openenv`: ``OPENENV_PYTHON``, or that of ``.venv-openenv`` (`just test-openenv` makes it)."""
    python = Path(os.environ.get("OPENENV_PYTHON") or ROOT / ".venv-openenv" / "bin" / "python")
    return python if python.is_file() else None


@contextmanager
def openenv_server(world: str, sessions: int, *, idle_seconds: float = 0, port: int = 0) -> Iterator[str]:
    """A server with that world ("echo" or "tools"); gives its address. It ends with this process at the latest."""
    python = openenv_python()
    assert python is not None, "there is no Python with openenv: run `just test-openenv`"
    arguments = [world, str(sessions), str(idle_seconds), str(port)]
    process = subprocess.Popen([python, SCRIPT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        listening = process.stdout.readline().strip()
        assert listening, f"the OpenEnv server ended with {process.wait(10)}"
        yield f"http://127.0.0.1:{listening}"
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
        process.stdin.close()
