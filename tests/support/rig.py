"""The rig of real processes: `fleetbus up` with the real roles (without a model) on a server that the test owns.

It copies the server's files, puts them back, damages them, removes subjects and changes the stream, as an outage or an operator
would. What each test does with it, and who runs it, stands in docs/concepts/simulation.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.errors import BusError
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, EvaluationFinished, LineageStarted, StepTrained, Subjects, TrainingFinished

SCRIPT = Path(__file__).parents[1] / "system" / "lossy_roles.py"
S = Subjects("default")
TRAIN = S.train("default")
ENTRIES = (LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished)
STEPS = 24
SETTINGS = {
    "LEARNER_STEPS": str(STEPS), "LEARNER_GROUPS": "2", "LEARNER_GROUP_SIZE": "2", "LEARNER_CHECKPOINT_EVERY": "2",
    "LEARNER_KEEP_CHECKPOINTS": "2", "LEARNER_CHECKPOINT_WAIT": "1", "EVALUATION_EPISODES": "0",
}  # fmt: skip


class Site:
    """A server of the test's own, and the folder of a run."""

    def __init__(self, server: NatsServerProcess, folder: Path, bus: Bus, settings: dict[str, str]) -> None:
        self.server = server
        self.folder = folder
        self.bus = bus
        self.store = folder / "nats"
        self.output = folder / "up.out"
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
        self._environment |= {f"FLEETBUS_{name}": value for name, value in (SETTINGS | settings).items()}

    @property
    def run_folder(self) -> Path:
        return self.folder / ".fleetbus" / "runs" / "default"

    @property
    def learner_log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.run_folder / "logs").glob("learner*.log")))

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of a command on the run."""
        with anyio.fail_after(90):
            ended = await anyio.run_process(
                self._line(*arguments), cwd=self.folder, env=self._environment, check=False, stderr=subprocess.STDOUT
            )
        return ended.returncode, ended.stdout.decode()

    def _line(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *arguments, "--nats", self.server.url]

    @asynccontextmanager
    async def up(self, *arguments: str) -> AsyncIterator[anyio.abc.Process]:
        with self.output.open("ab") as out:
            process = await anyio.open_process(
                self._line("up", *arguments), cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out,
            )  # fmt: skip
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.send_signal(signal.SIGINT)
                    with anyio.move_on_after(20):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.aclose()

    async def until_checkpoint(self, step: int) -> None:
        while not await self._is_declared():  # noqa: ASYNC110  # another process does it
            await anyio.sleep(0.05)
        async with self.bus.read([TRAIN]) as reader:
            while True:
                for _, stored in decode_entries(CheckpointStored, [await reader.receive()], beside=ENTRIES):
                    if stored.step >= step:
                        return

    async def _is_declared(self) -> bool:
        try:
            return (await self.bus.log_state()).last_sequence >= 0
        except BusError:
            return False

    async def entries(self, kind: type[Any]) -> list[Any]:
        stored = [entry async for entry in self.bus.scan([TRAIN])]
        return [message for _, message in decode_entries(kind, stored, beside=ENTRIES)]

    async def copy_store(self) -> Path:
        """The files of the server as they are: what a loss of power would leave."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            await anyio.to_thread.run_sync(shutil.copytree, self.store, self.folder / "copy")
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        return self.folder / "copy"

    async def put_back(self, copy: Path) -> None:
        await self.server.kill()
        shutil.rmtree(self.store)
        await anyio.Path(copy).rename(self.store)
        await self.server.restart()

    async def change_stream(self, **changes: Any) -> None:
        """As `nats stream edit` would."""
        assert isinstance(self.bus, NatsBus)
        api, log = self.bus._connection.api, self.bus._log
        config = (await api.ask(f"STREAM.INFO.{log}"))["config"]
        await api.ask(f"STREAM.UPDATE.{log}", config | changes)


@asynccontextmanager
async def site(folder: Path, **settings: str) -> AsyncIterator[Site]:
    """``settings`` as variables without their prefix."""
    async with run_server(folder / "nats") as server, connect(server.url, run="default", worker="test") as bus:
        with anyio.fail_after(180):
            yield Site(server, folder, bus, settings)


async def ended(process: anyio.abc.Process, seconds: float = 90) -> int:
    with anyio.fail_after(seconds):
        return await process.wait()
