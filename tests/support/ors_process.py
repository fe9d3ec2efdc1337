"""The real server of the Open Reward Standard as a process of its own Python: where that is, started, and ended."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/foreign/ors_environments/ors_server.py"


def ors_python() -> Path:
    """The Python with ors-sdk and openreward: ``ORS_PYTHON``, or that of ``.venv-ors`` (`just test-foreign` makes it)."""
    python = Path(os.environ.get("ORS_PYTHON") or ROOT / ".venv-ors" / "bin" / "python")
    assert python.is_file(), "there is no Python with ors-sdk: run `just test-foreign`"
    return python


@contextmanager
def ors_server(package: str, *, port: int = 0) -> Iterator[str]:
    """A server of ``package``, ``ors`` or ``openreward``; gives its address. It ends with this process at the latest."""
    process = subprocess.Popen(
        [ors_python(), SCRIPT, package, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        listening = ""
        while not listening.isdecimal():  # packages write their logs there, too
            line = process.stdout.readline()
            assert line, f"the ORS server ended with {process.wait(10)}"
            listening = line.decode().strip()
        drain_in_background(process)
        yield f"http://127.0.0.1:{listening}"
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()


def drain_in_background(process: subprocess.Popen[bytes]) -> None:
    """Read what a process writes until it ends, so that it never waits for a reader."""

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            while process.stdout.read(1 << 16):
                pass

    threading.Thread(target=read, daemon=True).start()
