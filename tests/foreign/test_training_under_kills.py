"""Environments of other packages are trained for five steps by `fleetbus up` while its workers are killed: none of their
episodes is lost or doubled. ``just test-foreign`` makes the interpreters.

Kills follow results, not the clock: on a busy machine a worker that is killed every few seconds plays nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus.bus.base import Bus
from fleetbus.config.load import load_configuration
from fleetbus.config.run_folder import read_earlier_configuration
from fleetbus.errors import BusError, UserError
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Subjects
from fleetbus_workers.run_access.log_access import open_run
from tests.foreign.trained_cases import CASES, FLEETBUS, TASKS, run_here

RUN = "killed"
STEPS, GROUPS, GROUP_SIZE = 5, 2, 4
SECONDS = 1800
KILLED_EVERY = 4
"""Results between two kills: half of a step's."""

VICTIMS = ("environment", "environment", "inference", "environment", "environment", "learner")
"""In turn; of the environment workers the one that stored the last result. More of them: theirs are the packages."""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(5400)]


@pytest.mark.parametrize("name", CASES)
async def test_an_environment_of_another_package_is_trained_under_kills(name: str, tmp_path: Path) -> None:
    async with CASES[name](tmp_path) as options:
        killed = await train(tmp_path, options)
    audit = json.loads(run_here(tmp_path, *FLEETBUS, "audit", RUN, "--deep", "--json"))
    print(name, audit, "killed:", *killed)
    assert audit["balanced"]
    assert set(killed) == set(VICTIMS)


async def train(folder: Path, options: list[str]) -> list[str]:
    """The roles that were killed until ``up`` ended."""
    sizes = ["--steps", f"{STEPS}", "--learner-groups", f"{GROUPS}", "--learner-group-size", f"{GROUP_SIZE}"]
    command = [*FLEETBUS, "up", "--run", RUN, *options, "--tasks", TASKS, *sizes]
    command += ["--environment-workers", "2", "--evaluation-episodes", "0", "--no-monitor"]
    killed: list[str] = []
    with (folder / "up.log").open("wb") as said:
        up = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)  # noqa: ASYNC220 - it starts at once
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(kill_in_turn, psutil.Process(up.pid), folder / ".fleetbus/runs", killed)
                with anyio.fail_after(SECONDS):
                    while up.poll() is None:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
                group.cancel_scope.cancel()
        finally:
            up.terminate()
            up.wait(60)
    assert up.returncode == 0, (folder / "up.log").read_text()
    return killed


async def kill_in_turn(up: psutil.Process, runs: Path, killed: list[str]) -> None:
    """After every `KILLED_EVERY` results the next of `VICTIMS`, with ``kill -9``; ``killed`` hears its role. Returns when the
    run's server stops."""
    with suppress(BusError):
        await kill_after_results(up, runs, killed)


async def kill_after_results(up: psutil.Process, runs: Path, killed: list[str]) -> None:
    async with follow(runs) as bus, bus.read([Subjects(RUN).episodes]) as reader:
        for role in itertools.cycle(VICTIMS):
            results: list[EpisodeFinished] = []
            while len(results) < KILLED_EVERY:
                entry = decode_episode_entry(await reader.receive())
                results += [entry] if isinstance(entry, EpisodeFinished) else []
            words = f" --name {results[-1].worker} " if role == "environment" else f" fleetbus_workers.cli {role} "
            with suppress(psutil.NoSuchProcess, StopIteration):
                next(child for child in up.children() if words in f" {' '.join(child.cmdline())} ").kill()
                killed.append(role)


@asynccontextmanager
async def follow(runs: Path) -> AsyncIterator[Bus]:
    """The run's log, as soon as there is one."""
    flags = {"run.name": RUN, "run.folder": str(runs)}
    while True:
        loaded = load_configuration(file=None, variables=os.environ, flags=flags, earlier=read_earlier_configuration)
        try:
            async with open_run(loaded.configuration, "monitor") as bus:
                yield bus
            return
        except UserError:
            await anyio.sleep(0.2)
