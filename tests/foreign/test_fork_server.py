"""The server that each episode of some packages is forked from: it has imported what an episode would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus_workers.environment.adapters import foreign

INSIDE = Path(foreign.__file__).parent / "inside"
PLAY = """
import asyncio, json
from fleetbus_process import call_in_process, prepare_server

async def play():
    server = prepare_server(["raising", "exiting", "nowhere", "package"])
    import package
    print(json.dumps([package.IMPORTED_BY, *[await call_in_process(server, package.tell) for _ in range(2)]]))

if __name__ == "__main__":
    asyncio.run(play())
"""
PACKAGE = """
import os
IMPORTED_BY = os.getpid()

def tell():
    return [IMPORTED_BY, os.getpid(), os.environ.get("PYTHONPATH"), os.environ.get("FLEETBUS_PRELOAD")]
"""


@pytest.mark.integration
def test_an_episode_finds_its_package_imported_whatever_another_raises_and_its_variables_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("raise ValueError('not here')")
    (tmp_path / "exiting.py").write_text("raise SystemExit('not licensed')")
    (tmp_path / "package.py").write_text(PACKAGE)
    (tmp_path / "play.py").write_text(PLAY)
    path = os.pathsep.join([str(INSIDE), str(tmp_path)])
    command = [sys.executable, str(tmp_path / "play.py")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    runner, *episodes = json.loads(done.stdout)
    servers, processes, paths, asked = zip(*episodes, strict=True)
    assert len(set(servers)) == 1 and not set(servers) & {runner, *processes}, "one process has imported it, and plays nothing"
    assert len(set(processes)) == 2
    assert set(paths) == {path} and set(asked) == {None}
