"""`fleetbus up` as a user types it, with a key per role: it trains, tells nobody its secrets, and shows itself to a key."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleetbus.bus.nats.local_key import KEY_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NKEY_SEED = re.compile(rb"\bS[A-Z2-7]{57}\b")
SMALL = [
    "--steps",
    "2",
    "--learner-groups",
    "2",
    "--learner-group-size",
    "4",
    "--evaluation-episodes",
    "4",
    "--no-evaluation-greedy",
]


def fleetbus(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fleetbus_workers.cli", *arguments]


def shown_by_ps(pid: int) -> list[bytes]:
    """Command lines and environments of a process and all below it."""
    texts = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            texts.append(" ".join(process.cmdline()).encode())
            texts.append(repr(process.environ()).encode())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return texts


def test_a_run_with_keys_trains_and_its_secrets_stay_in_their_files(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    written = subprocess.run(fleetbus("auth", "init", "keys"), cwd=tmp_path, env=environment, capture_output=True, check=True)
    seen: list[bytes] = [written.stdout, written.stderr]
    command = fleetbus("up", "--nats-auth", "keys", *SMALL)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                seen += [line, *shown_by_ps(process.pid)]
            assert process.wait(timeout=60) == 0, b"".join(seen[-20:])
        finally:
            process.terminate()
    audit = subprocess.run(fleetbus("audit", "--nats-auth", "keys"), cwd=tmp_path, env=environment, capture_output=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    files = [file for file in (tmp_path / ".fleetbus").rglob("*") if file.is_file()]
    keys = [file for file in files if file.name == KEY_FILE]  # of the server that showed the run's files to `audit`
    assert [stat.S_IMODE(file.stat().st_mode) for file in keys] in ([], [0o600])
    seen += [file.read_bytes() for file in files if file not in keys]
    assert any(b"fleetbus_workers.cli environment" in text for text in seen)
    assert [found for text in seen if (found := NKEY_SEED.search(text))] == []
