"""A server that loses its newest entries, as by a loss of power: its store is copied while it is stopped, put back later."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import (
    Configuration,
    EpisodeSettings,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.delivery.lanes import LaneLost, claim_lane
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, LineageStarted, PolicyPublished, StepTrained, Subjects, Task, TrainingFinished
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import run_recorder
from tests.support.cluster import Cluster, cluster, declare_streams

pytestmark = pytest.mark.integration

S = Subjects("cut")
CUTS = 20
STEPS = 1000


class Deployment:
    """All roles, and a learner that trains until it is stopped."""

    def __init__(self, url: str, folder: Path, steps: int) -> None:
        self._url = url
        self._tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 2}) for index in range(4)]
        self.archive = folder / "archive"
        self.configuration = Configuration(
            run=RunSettings(name="cut", folder=str(folder)),
            nats=NatsSettings(lanes=4),
            learner=LearnerSettings(steps=steps, groups=2, group_size=2, checkpoint_every=1, keep_checkpoints=1000),
            episode=EpisodeSettings(max_turns=2),
            evaluation=EvaluationSettings(episodes=0),
            limits=LimitSettings(drain=0.5),
        )

    async def run(self, drain: anyio.Event, *, archive: Path) -> None:
        """Until the training ends or ``drain`` is set; then the recorder archives the rest."""
        recorded = anyio.Event()
        options = {"configuration": self.configuration}
        async with anyio.create_task_group() as group:

            async def play() -> None:
                async with connect(self._url, run="cut", worker="e") as bus:
                    await run_environment(bus, **options, name="e", drain=drain, make=ScriptedEnvironment)  # type: ignore[arg-type]

            async def infer() -> None:
                async with connect(self._url, run="cut", worker="i") as bus:
                    sampler, template = ScriptedSampler(), ScriptedTemplate()
                    await run_inference(bus, **options, name="i", drain=drain, sampler=sampler, template=template)  # type: ignore[arg-type]

            async def record() -> None:
                async with connect(self._url, run="cut", worker="r") as bus:
                    await run_recorder(bus, **options, name="r", drain=recorded, folder=archive)  # type: ignore[arg-type]

            for work in (play, infer, record):
                group.start_soon(work)
            async with connect(self._url, run="cut", worker="l") as bus:
                await run_learner(
                    bus, configuration=self.configuration, name="l", drain=drain, trainer=ScriptedTrainer(),
                    curriculum=Curriculum(self._tasks, self._tasks, seed=1),
                )  # fmt: skip
            drain.set()
            recorded.set()


OTHERS = (LineageStarted, CheckpointStored, TrainingFinished)


async def wait_for_steps(bus: Bus, count: int) -> None:
    async with bus.read([S.train("default")]) as reader:
        while count:
            count -= len(decode_entries(StepTrained, [await reader.receive()], beside=OTHERS))


async def count_steps(bus: Bus) -> int:
    entries = [entry async for entry in bus.scan([S.train("default")])]
    return len(decode_entries(StepTrained, entries, beside=OTHERS))


@asynccontextmanager
async def stopped(pids: Iterable[int]) -> AsyncIterator[None]:
    """Servers that neither store nor say anything: what their files hold now is what a loss of power would leave."""
    pids = tuple(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def train_and_copy(url: str, deployment: Deployment, draw: random.Random, copy: Callable[[], Awaitable[None]]) -> int:
    """Train, copy the servers' files at a random moment, and train on. Returns the newest version that was published."""
    async with connect(url, run="cut", worker="test") as bus:
        async with anyio.create_task_group() as group:
            drain = anyio.Event()

            async def run() -> None:
                await deployment.run(drain, archive=deployment.archive)

            group.start_soon(run)
            await wait_for_steps(bus, draw.randint(2, 6))
            await anyio.sleep(draw.uniform(0.0, 0.3))
            await copy()
            await wait_for_steps(bus, await count_steps(bus) + draw.randint(4, 8))
            drain.set()
        policy = [entry async for entry in bus.scan([S.policy("default")])]
    return max(version.version for _, version in decode_entries(PolicyPublished, policy, beside=(LineageStarted,)))


async def check_that_it_goes_on(url: str, deployment: Deployment, folder: Path, reached: int) -> None:
    """The recorder refuses, the audit names what was lost, and training goes on from a checkpoint with versions of its own."""
    async with connect(url, run="cut", worker="test") as bus:
        known = [entry async for entry in bus.scan([S.train("default")])]
        steps = await count_steps(bus)
        options = {"configuration": deployment.configuration, "name": "r", "drain": anyio.Event()}
        with pytest.raises(UserError, match="lost entries from"):
            await run_recorder(bus, **options, folder=deployment.archive)  # type: ignore[arg-type]
        report = await audit_run(bus, S, archive=deployment.archive)
        lost = next(finding for finding in report.findings if finding.kind == "entries_lost")
        assert lost.count > 20
        assert any(name.startswith("g0000") and name.endswith(": request") for name in lost.ids)

        again = Deployment(url, folder, steps + 2)
        await again.run(anyio.Event(), archive=folder / "second")
        trained = [entry async for entry in bus.scan([S.train("default")])]
        beside = (StepTrained, CheckpointStored, TrainingFinished)
        lineages = [each for _, each in decode_entries(LineageStarted, trained, beside=beside)]
        versions = [
            version.version
            async for entry in bus.scan([S.policy("default")], start=known[-1].sequence + 1)
            for _, version in decode_entries(PolicyPublished, [entry], beside=(LineageStarted,))
        ]
        whole = await audit_run(bus, S)
    assert len(lineages) == 2
    assert lineages[1].parent_step > 0
    assert min(version for version in versions if version > steps + 1) > reached
    assert whole.findings == ()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, CUTS))])
async def test_after_a_log_went_back_in_time_training_goes_on_from_what_it_knows_and_the_audit_names_what_was_lost(
    tmp_path: Path, seed: int
) -> None:
    store, copy = tmp_path / "nats", tmp_path / "copy"
    with anyio.fail_after(220):
        async with run_server(store) as server:
            deployment = Deployment(server.url, tmp_path, STEPS)
            async with connect(server.url, run="cut", worker="test") as bus:
                await bus.declare(plan_run("cut", lanes=4))

            async def copy_store() -> None:
                async with stopped([server.pid]):
                    await anyio.to_thread.run_sync(shutil.copytree, store, copy)

            reached = await train_and_copy(server.url, deployment, random.Random(seed), copy_store)
            await server.kill()
            shutil.rmtree(store)
            shutil.copytree(copy, store)
            await server.restart()
            await check_that_it_goes_on(server.url, deployment, tmp_path, reached)


async def test_a_worker_that_was_there_before_ends_when_it_renews_its_lane(tmp_path: Path) -> None:
    store, copy = tmp_path / "nats", tmp_path / "copy"
    with anyio.fail_after(50):
        async with run_server(store) as server, connect(server.url, run="cut", worker="e") as bus:
            await bus.declare(plan_run("cut", lanes=1))
            lane = await claim_lane(bus, S, role="environment", names=("e0",), worker="e", nonce="n")
            async with stopped([server.pid]):
                await anyio.to_thread.run_sync(shutil.copytree, store, copy)
            await lane.renew(bus)
            await server.kill()
            shutil.rmtree(store)
            copy.rename(store)
            await server.restart()
            with pytest.raises(LaneLost, match="went back in time"):
                while True:
                    await lane.renew(bus)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "cut"), [(0, 3), (1, 3), (2, 3), (3, 2), (4, 2)])
async def test_three_servers_of_which_most_went_back_in_time_go_on_as_one_does(tmp_path: Path, seed: int, cut: int) -> None:
    """With ``cut`` 2 the third one comes back later, with entries that the others lost and have given new ones for."""
    with anyio.fail_after(380):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers, "cut")
            deployment = Deployment(servers.url, tmp_path, STEPS)
            reached = await train_and_copy(servers.url, deployment, random.Random(seed), partial(copy_stores, servers))
            await put_back(servers, range(cut))
            await declare_streams(servers, "cut")
            if cut < 3:
                await publish_something(servers.url)
                await servers.start(2)
            await check_that_it_goes_on(servers.url, deployment, tmp_path, reached)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_of_three_servers_one_that_went_back_in_time_loses_nothing(tmp_path: Path) -> None:
    with anyio.fail_after(380):
        async with cluster(tmp_path) as servers:
            await declare_streams(servers, "cut")
            deployment = Deployment(servers.url, tmp_path, STEPS)
            await train_and_copy(servers.url, deployment, random.Random(5), partial(copy_stores, servers))
            async with connect(servers.url, run="cut", worker="test") as bus:
                last = (await bus.log_state()).last_sequence
            await put_back(servers, [0])
            await servers.start(1)
            await servers.start(2)
            await declare_streams(servers, "cut")
            async with connect(servers.url, run="cut", worker="test") as bus:
                assert (await bus.log_state()).last_sequence == last
                report = await audit_run(bus, S, archive=deployment.archive)
    assert report.findings == ()


async def copy_stores(servers: Cluster) -> None:
    async with stopped(process.pid for process in servers.processes.values()):
        for index in range(3):
            await anyio.to_thread.run_sync(shutil.copytree, servers.store(index), servers.folder / f"copy{index}")


async def put_back(servers: Cluster, rolled_back: Iterable[int]) -> None:
    """All servers lose their power; some begin again with what they had when their files were copied, the others wait."""
    for index in list(servers.processes):
        await servers.kill(index)
    for index in rolled_back:
        shutil.rmtree(servers.store(index))
        (servers.folder / f"copy{index}").rename(servers.store(index))
        await servers.start(index)


async def publish_something(url: str) -> None:
    """Other entries at positions that the server that is still away knows."""
    async with connect(url, run="cut", worker="test") as bus:
        for number in range(3):
            await bus.publish(S.life("learner", f"t{number}"), b"x", timeout=120)
