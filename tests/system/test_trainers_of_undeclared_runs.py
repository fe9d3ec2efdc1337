"""A trainer that names a run which the server does not have, or another one than it is connected to, is told so in one line."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.client import connect, load_configuration, rollouts
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import Task
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.trl import TrlRollouts
from fleetbus_workers.trainers.trl_rollout_func import FleetbusRollouts

pytestmark = pytest.mark.integration

TASKS = [Task(key="t", prompt="p")]
REFUSED = r"^no run absent on this server: `fleetbus init --run absent` declares it; or check --run and --nats$"


async def test_a_trainer_that_samples_itself_is_told_that_there_is_no_such_run(tmp_path: Path) -> None:
    async with run_server(tmp_path / "nats") as server:
        with pytest.raises(UserError, match=REFUSED):
            await anyio.to_thread.run_sync(lambda: EpisodeSource.open(None, url=server.url, run="absent", tasks=TASKS))


async def test_a_rollout_func_is_told_that_there_is_no_such_run(tmp_path: Path) -> None:
    async with run_server(tmp_path / "nats") as server:
        rollouts = FleetbusRollouts(name="absent", nats_url=server.url, tasks=TASKS, publish=False)
        trainer = SimpleNamespace(args=SimpleNamespace(temperature=1.0))
        with pytest.raises(UserError, match=REFUSED):
            await anyio.to_thread.run_sync(rollouts, ["t"], trainer)
        await anyio.to_thread.run_sync(rollouts.close)


async def test_the_trainer_of_a_run_is_told_that_there_is_no_such_run(tmp_path: Path) -> None:
    (file := tmp_path / "tasks.json").write_text('[{"key": "t", "prompt": "p"}]')
    async with run_server(tmp_path / "nats") as server:
        rollouts = TrlRollouts(name="absent", nats_url=server.url, tasks=str(file), steps=1, folder=str(tmp_path))
        with pytest.raises(UserError, match=REFUSED):
            await anyio.to_thread.run_sync(rollouts.find_checkpoint)


async def test_a_loop_with_the_configuration_of_another_run_is_told_which_run_it_is_connected_to(tmp_path: Path) -> None:
    configuration = load_configuration(flags={"run.name": "r2"}).configuration
    async with run_server(tmp_path / "nats") as server, connect(server.url, run="r1", role="operator", worker="trainer") as bus:
        await bus.declare(plan_run("r1"))
        with pytest.raises(BusError, match=r"this is a connection of run r1, no .* stores fb\.r2\."):
            async with rollouts(bus, configuration, TASKS) as groups:
                await anext(aiter(groups))


async def test_a_loop_of_a_run_that_is_not_there_leaves_nothing_open(tmp_path: Path) -> None:
    configuration = load_configuration(flags={"run.name": "r1"}).configuration
    async with run_server(tmp_path / "nats") as server, connect(server.url, run="r1", role="operator", worker="trainer") as bus:
        with pytest.raises(BusError, match="fb_r1: stream not found"):
            async with rollouts(bus, configuration, TASKS):
                pass
    gc.collect()  # a stream that was left open would be told here
