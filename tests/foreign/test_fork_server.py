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


ENDS = """
import asyncio, json, sys
from fleetbus_process import EpisodeFailed, call_in_process, prepare_server

async def play():
    server = prepare_server(["ending"])
    import ending
    for name in sys.argv[1:]:
        try:
            print(json.dumps(await call_in_process(server, getattr(ending, name))))
        except EpisodeFailed as failed:
            print(json.dumps(str(failed)))

if __name__ == "__main__":
    asyncio.run(play())
"""
ENDING = """
import os, threading, sys

def stay():
    threading.Thread(target=threading.Event().wait).start()

def exits():
    stay()
    sys.exit("no licence")

def interrupts():
    stay()
    raise KeyboardInterrupt

class Mute(BaseException):
    def __str__(self):
        sys.exit("mute")

def says_nothing():
    stay()
    raise Mute

def leaves_a_process():
    if os.fork() == 0:
        threading.Event().wait(20)
    os._exit(3)

def gives_code():
    class Evil:
        def __reduce__(self):
            return print, ("it was run",)
    return Evil()

def gives_much():
    return "x" * (2 << 20)

def goes_on():
    return "as ever"
"""


@pytest.mark.integration
def test_however_an_episode_s_code_ends_its_process_the_episode_is_over_and_the_next_is_played(tmp_path: Path) -> None:
    """A thread that the code had left kept a process that raised anything but SystemExit, and its episode waited for it."""
    (tmp_path / "ending.py").write_text(ENDING)
    (tmp_path / "play.py").write_text(ENDS)
    path = os.pathsep.join([str(INSIDE), str(tmp_path)])
    ends = {
        "exits": "SystemExit: no licence",
        "interrupts": "KeyboardInterrupt: ",
        "says_nothing": "Mute",
        "leaves_a_process": "the process of the episode ended without a result",
        "gives_code": "TypeError: Object of type Evil is not JSON serializable",
        "gives_much": "the result of the episode has more than 1048576 bytes",
        "goes_on": "as ever",
    }
    command = [sys.executable, str(tmp_path / "play.py"), *ends]
    with open(tmp_path / "said", "w+b") as said:  # a pipe would stay open as long as what was left has it
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=said, check=True, timeout=300)
    assert list(map(json.loads, (tmp_path / "said").read_text().splitlines())) == list(ends.values())


KIND = """
import asyncio, contextlib, threading

@contextlib.asynccontextmanager
async def open_environment(name, arguments):
    yield Environment()

class Environment:
    async def play(self, task, base_url):
        if task == "inside":
            raise type("Odd", (BaseException,), {})("inside")
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        await asyncio.create_task(self.exit())

    async def exit(self):
        raise SystemExit("from within")
"""


@pytest.mark.integration
def test_a_package_that_exits_in_a_task_of_its_own_ends_the_runner_whatever_thread_is_left(tmp_path: Path) -> None:
    """All episodes of the runner waited for a thread that never ended."""
    (tmp_path / "fleetbus_exiting.py").write_text(KIND)
    for name in ("requests", "replies"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, str(INSIDE / "fleetbus_runner.py"), "exiting", "name"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as runner:
        try:
            with open(tmp_path / "requests", "w", buffering=1) as requests, open(tmp_path / "replies") as replies:
                assert json.loads(replies.readline()) == {"ready": True}
                for number, task in enumerate(["inside", "beside"]):
                    asked = {"id": number, "task": task, "base_url": "", "reward_url": ""}
                    requests.write(json.dumps(asked) + "\n")
                    if task == "inside":
                        assert json.loads(replies.readline()) == {"id": 0, "error": "Odd: inside"}
                assert runner.wait(timeout=120) == 1
        finally:
            runner.kill()
