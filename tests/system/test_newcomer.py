"""A newcomer's first environment, made by `fleetbus new environment`, with one mistake: `up` names it, and ends the run.

Real processes: the server and the environment worker; a learner and an inference worker without a model. One run is all real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import psutil
import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.integration]

WITHOUT_MODEL = [sys.executable, str(Path(__file__).with_name("newcomer_roles.py"))]
REAL = [sys.executable, "-m", "fleetbus_workers.cli"]

SETTINGS = ["--no-check", "--environment", "my_game:MyGame", "--tasks", "my_game_tasks.json", "--learner-groups", "4"]
SCREEN_SECONDS = 15.0
"""Until a mistake is on the screen, counted from the first episode that could meet it."""

STEP = "        digits = re.findall"
MISTAKES = {
    "raise": ("raise KeyError('no such room')\n", "KeyError", "KeyError", "my_game.py:{body} in MyGame.step"),
    "None": ("return None\n", "step returned None; it must return Step", "InvalidReturn", "my_game.py:{method} in MyGame.step"),
    "NaN": (
        "return Step(reward=float('nan'))\n",
        "was rewarded nan",
        "reward_not_finite",
        "my_game.py:{method} in MyGame.step",
    ),
    "wrong role": (
        "return Step(messages=(ChatMessage(role='usr', content='hm'),))\n",
        "role is 'usr'; it must be one of system, user, assistant, tool",
        "InvalidReturn",
        "my_game.py:{method} in MyGame.step",
    ),
    "blocking sleep": ("import time; time.sleep(3600)\n", "blocked at", "", "my_game.py:{body} in MyGame.step"),
}


def fleetbus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*REAL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def locations(folder: Path, error_class: str) -> set[str]:
    """The places that `fleetbus episodes` names for failures of a class."""
    rows = json.loads(fleetbus(folder, "episodes", "--json", "--limit", "20", "--error", error_class).stdout)
    return {row["error_location"] for row in rows}


def plant(folder: Path, mistake: str) -> str:
    """Write the environment with the mistake at the beginning of `step`; returns the location that is to be named."""
    assert fleetbus(folder, "new", "environment", "my_game").returncode == 0
    source = (folder / "my_game.py").read_text()
    code, _, _, location = MISTAKES[mistake]
    assert STEP in source
    (folder / "my_game.py").write_text(source.replace(STEP, f"        {code}{STEP}", 1))
    lines = (folder / "my_game.py").read_text().splitlines()
    method = next(number for number, line in enumerate(lines, 1) if "def step" in line)
    body = next(number for number, line in enumerate(lines, 1) if line.strip() == code.strip())
    return location.format(method=method, body=body)


class Up:
    def __init__(self, process: anyio.abc.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text()

    async def has(self, text: str, within: float) -> float:
        """Seconds until the text is on the screen."""
        began = time.monotonic()
        while text not in self.out:
            assert time.monotonic() - began < within, f"{text!r} is not on the screen:\n{self.out}\n{self.errors}"
            await anyio.sleep(0.05)
        return time.monotonic() - began


@asynccontextmanager
async def up(folder: Path, *arguments: str, command: list[str] = WITHOUT_MODEL) -> AsyncIterator[Up]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = await anyio.open_process(
            [*command, "up", *SETTINGS, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        yield Up(process, folder)
    finally:
        with anyio.CancelScope(shield=True):
            left = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
            for each in left:
                each.kill()
            if process.returncode is None:
                process.kill()
            await process.aclose()


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "blocking sleep"])
async def test_a_mistake_is_named_on_the_screen_and_ends_the_run_with_its_cause(tmp_path: Path, mistake: str) -> None:
    await check_mistake(tmp_path, mistake, WITHOUT_MODEL)


@pytest.mark.slow
async def test_the_same_with_the_starter_policy(tmp_path: Path) -> None:
    await check_mistake(tmp_path, "raise", REAL)


async def check_mistake(folder: Path, mistake: str, command: list[str]) -> None:
    location = plant(folder, mistake)
    words = MISTAKES[mistake][1]
    async with up(folder, command=command) as running:
        await running.has("inference is ready", within=100)
        await running.has(location, within=SCREEN_SECONDS)
        assert words in running.out
        with anyio.fail_after(60):
            assert await running.process.wait() == 1
        last = running.errors.splitlines()[-1]
        assert "episodes in a row ended without a grade" in last
        assert words in last and location in last
        if mistake == "raise":
            assert "  |     raise KeyError('no such room')" in running.out.splitlines()
    log = (folder / ".fleetbus" / "runs" / "default" / "logs" / "environment.log").read_text()
    assert location.partition(":")[0] in log


async def test_a_step_that_blocks_the_worker_is_named_and_ends_the_run(tmp_path: Path) -> None:
    location = plant(tmp_path, "blocking sleep")
    async with up(tmp_path, "--limits-no-progress", "15") as running:
        await running.has("inference is ready", within=100)
        await running.has(f"environment: blocked at {location}", within=SCREEN_SECONDS)
        top = await anyio.to_thread.run_sync(fleetbus, tmp_path, "top", "--once", "--json")
        assert top.returncode == 1
        (stall,) = json.loads(top.stdout)["stalls"]
        assert location in stall["reason"]
        with anyio.fail_after(60):
            assert await running.process.wait() == 1
        assert location in running.errors.splitlines()[-1]


async def test_failures_are_read_with_their_place_while_the_run_goes_on(tmp_path: Path) -> None:
    location = plant(tmp_path, "raise")
    async with up(tmp_path, "--limits-ungraded-episodes", "0") as running:
        await running.has(location, within=100)
        assert await anyio.to_thread.run_sync(locations, tmp_path, "KeyError") == {location}
        listed = await anyio.to_thread.run_sync(fleetbus, tmp_path, "episodes")
        assert f"({location})" in listed.stdout
        first = next(word for word in listed.stdout.splitlines()[-1].split() if word.endswith("`")).strip("`")
        shown = await anyio.to_thread.run_sync(fleetbus, tmp_path, "episodes", "default", first)
        assert f"failed at {location}" in shown.stdout
        assert "raise KeyError('no such room')" in shown.stdout
        running.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            assert await running.process.wait() == 0


async def test_a_run_that_works_says_nothing_of_failures(tmp_path: Path) -> None:
    assert fleetbus(tmp_path, "new", "environment", "my_game").returncode == 0
    async with up(tmp_path) as running:
        await running.has("held out, start", within=100)
        running.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            assert await running.process.wait() == 0
    assert " ended " not in running.out and "blocked" not in running.out
