"""A run of real processes with TRL as its trainer, for tests that kill them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from fleetbus.bus.nats.server import run_server

ROOT = Path(__file__).parents[2]
STARTER = ROOT / "workers/fleetbus_workers/starter/policy"
SCRIPT = ROOT / "tests/trainers/train_with_trl.py"
FLEETBUS = [sys.executable, "-m", "fleetbus_workers.cli"]
GROUPS, GROUP_SIZE = 4, 4
ROLES = ("environment", "inference", "environment", "inference")


class Deployment:
    """A server and workers of the given roles. Whatever is killed is started again."""

    def __init__(self, folder: Path, url: str, stack: ExitStack, settings: dict[str, str]) -> None:
        self.folder = folder
        self.url = url
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

    async def start(self, roles: Sequence[str]) -> None:
        await self.call("init")
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
async def deployed(folder: Path, roles: Sequence[str] = ROLES, **settings: str) -> AsyncIterator[Deployment]:
    async with run_server(folder / "nats") as server:
        with ExitStack() as stack:
            deployment = Deployment(folder, server.url, stack, settings)
            await deployment.start(roles)
            yield deployment
