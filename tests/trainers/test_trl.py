"""TRL's `AsyncGRPOTrainer` as the trainer of a run of real processes, which are killed: `just test-trl`.

TRL says itself which episodes its steps trained (train_with_trl.py); the run's log says it, too.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("trl")

from fleetbus.bus.nats.server import run_server

ROOT = Path(__file__).parents[2]
STARTER = ROOT / "workers/fleetbus_workers/starter/policy"
SCRIPT = ROOT / "tests/trainers/train_with_trl.py"
FLEETBUS = [sys.executable, "-m", "fleetbus_workers.cli"]
GROUPS, GROUP_SIZE = 4, 4

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


class Deployment:
    """A server, two environment workers and two inference workers. Whatever is killed is started again."""

    def __init__(self, folder: Path, url: str, stack: ExitStack, settings: dict[str, str]) -> None:
        self.folder = folder
        self._stack = stack
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("FLEETBUS_")}
        given = {
            "NATS_URL": url, "RUN_NAME": "trl", "RUN_FOLDER": str(folder / "run"), "RUN_MODEL": str(STARTER),
            "LEARNER_GROUPS": str(GROUPS), "LEARNER_GROUP_SIZE": str(GROUP_SIZE), "EVALUATION_EPISODES": "0",
        } | settings  # fmt: skip
        self._environment |= {f"FLEETBUS_{name}": value for name, value in given.items()} | {"HF_HUB_OFFLINE": "1"}
        self._roles: list[tuple[str, subprocess.Popen[bytes]]] = []

    async def call(self, *words: str) -> str:
        with anyio.fail_after(300):
            done = await anyio.run_process(
                [*FLEETBUS, *words], env=self._environment, cwd=self.folder, stderr=subprocess.STDOUT, check=False
            )
        assert done.returncode == 0, done.stdout
        return done.stdout.decode()

    async def start(self) -> None:
        await self.call("init")
        roles = ("environment", "inference", "environment", "inference")
        self._roles = [(role, self.spawn([*FLEETBUS, role], role)) for role in roles]

    def spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        """A process that ends with the test at the latest."""
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(command, env=self._environment, cwd=self.folder, stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def train(self, processes: int = 1) -> subprocess.Popen[bytes]:
        """Steps have the same number of rows however many processes there are."""
        program = [str(SCRIPT), str(STARTER), "out", "--rows", str(8 // processes)]
        if processes > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            return self.spawn([sys.executable, *launch, *program], "trl")
        return self.spawn([sys.executable, *program], "trl")

    def change(self, **settings: str) -> None:
        """For programs that are started from now on."""
        self._environment |= {f"FLEETBUS_{name}": value for name, value in settings.items()}

    def replace(self, index: int) -> None:
        """``kill -9`` of one role, and another in its place."""
        role, process = self._roles[index]
        process.kill()
        self._roles[index] = role, self.spawn([*FLEETBUS, role], role)

    async def wait_for_step(self, step: int, trainer: subprocess.Popen[bytes]) -> None:
        with anyio.fail_after(400):
            while all(line["step"] < step for line in self.read_trained()):
                assert trainer.poll() is None, self.said
                await anyio.sleep(0.1)  # another process writes it

    async def wait_for_end(self, trainer: subprocess.Popen[bytes]) -> None:
        with anyio.fail_after(900):
            assert await anyio.to_thread.run_sync(trainer.wait, abandon_on_cancel=True) == 0, self.said

    def read_trained(self) -> list[dict[str, Any]]:
        file = self.folder / "out/trained.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def said(self) -> str:
        return (self.folder / "trl.log").read_text()[-4000:]


@asynccontextmanager
async def deployed(folder: Path, **settings: str) -> AsyncIterator[Deployment]:
    async with run_server(folder / "nats") as server:
        with ExitStack() as stack:
            deployment = Deployment(folder, server.url, stack, settings)
            await deployment.start()
            yield deployment


def list_surviving(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that no later process began before: what TRL's last checkpoint is made of."""
    return [
        line for place, line in enumerate(lines) if all(later["began"] >= line["step"] for later in find_later(lines, place))
    ]


def find_later(lines: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    return [later for later in lines[place:] if later["process"] != lines[place]["process"]]


async def check_each_trained_once(deployment: Deployment) -> dict[str, Any]:
    """TRL trained each episode in one step of its surviving history, and the log says the same; returns the audit's books."""
    surviving = list_surviving(deployment.read_trained())
    assert [line["step"] for line in surviving] == list(range(1, len(surviving) + 1))
    trained = [episode for line in surviving for episode in line["episodes"]]
    assert len(trained) == len({*trained})
    audit = json.loads(await deployment.call("audit", "trl", "--deep", "--json"))
    assert audit["balanced"], audit
    assert audit["books"]["trained"] == len(trained)
    books: dict[str, Any] = audit["books"]
    return books


async def test_trl_trains_a_run_to_its_end_and_each_episode_once(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="4") as deployment:
        await deployment.wait_for_end(deployment.train())
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 4 * GROUPS * GROUP_SIZE
        assert (tmp_path / "run/trl/model/model.safetensors").exists()


async def test_two_processes_train_each_episode_once_and_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="2", LEARNER_CHECKPOINT_EVERY="1") as deployment:
        await deployment.wait_for_end(deployment.train(processes=2))
        deployment.change(LEARNER_STEPS="4")
        await deployment.wait_for_end(deployment.train(processes=2))
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 4 * GROUPS * GROUP_SIZE
        assert {line["began"] for line in deployment.read_trained()} == {0, 2}


async def test_killed_in_the_middle_trl_goes_on_from_its_checkpoint_and_no_task_is_asked_for_twice(tmp_path: Path) -> None:
    async with deployed(tmp_path, LEARNER_STEPS="6", LEARNER_CHECKPOINT_EVERY="2") as deployment:
        first = deployment.train()
        await deployment.wait_for_step(4, first)
        first.kill()
        await deployment.wait_for_end(deployment.train())
        books = await check_each_trained_once(deployment)
        assert books["requested"] == 6 * GROUPS * GROUP_SIZE
        assert {line["began"] for line in deployment.read_trained()} in ({0, 2}, {0, 4})


@pytest.mark.slow
async def test_thirty_steps_of_trl_under_kills_of_all_roles_and_of_itself(tmp_path: Path) -> None:
    """A role every ten seconds in turn, TRL itself three times."""
    kills = {"roles": 0, "trl": 0}
    async with deployed(tmp_path, LEARNER_STEPS="30", LEARNER_CHECKPOINT_EVERY="3") as deployment:

        async def kill_roles() -> None:
            for index in itertools.cycle(range(4)):
                await anyio.sleep(10)
                deployment.replace(index)
                kills["roles"] += 1

        async with anyio.create_task_group() as group:
            group.start_soon(kill_roles)
            for step in (7, 15, 23):
                trainer = deployment.train()
                await deployment.wait_for_step(step, trainer)
                trainer.kill()
                kills["trl"] += 1
            await deployment.wait_for_end(deployment.train())
            group.cancel_scope.cancel()
        books = await check_each_trained_once(deployment)
    print(kills, books)
    assert books["requested"] == books["trained"] + sum(books["excluded"].values())
