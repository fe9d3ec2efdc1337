"""Whoever waits for a replay at a terminal sees how far it has come, in lines that fit; files and pipes get none of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fleetbus_workers.replay import Replay, replay_recording
from fleetbus_workers.replay.progress import Progress

HERE = Path(__file__).parent
GUESSING = HERE / "recordings" / "guessing.fbrec"
LEARNER = ("--role", "learner", "--until", "batches")
SHARED = ("--role", "environment", "--environment", "guessing:Guessing", "--jobs", "2")

pytestmark = pytest.mark.timeout(180)


def on_terminal(*options: str) -> tuple[int, str]:
    """Exit status and what a terminal is shown on standard error."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    command = [sys.executable, "-m", "fleetbus_workers.cli", "replay", str(GUESSING), *options]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1])))}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs, env=variables)
    os.close(theirs)
    reader.start()
    try:
        status = process.wait(timeout=150)
    finally:
        process.kill()
        reader.join()
        os.close(ours)
    return status, b"".join(shown).decode()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "counted"),
    [(LEARNER, r"learner: 47 of 47 messages, \d+ s"), (SHARED, r"environment: 33 of 33 episodes, \d+ s")],
    ids=["one process", "two processes"],
)
def test_a_terminal_is_shown_how_far_the_replay_has_come(options: tuple[str, ...], counted: str) -> None:
    status, shown = on_terminal(*options)
    assert status == 0, shown
    *lines, last = shown.split("\r")
    assert any(re.match(counted, line) for line in lines), shown
    assert all(len(line) < 80 for line in lines) and not shown.count("\n")
    assert not last and not lines[-1].strip(), "the line is gone when the report comes"


@pytest.mark.integration
def test_a_pipe_gets_the_report_alone() -> None:
    command = [sys.executable, "-m", "fleetbus_workers.cli", "replay", str(GUESSING), *LEARNER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert done.stderr == "" and done.stdout.startswith("learner: compared")


@pytest.mark.integration
async def test_progress_of_all_shares_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    progress = Progress()
    await replay_recording(GUESSING, Replay(environment="guessing:Guessing", jobs=3), progress)
    assert progress.done == progress.total == 33
