"""A server that loses its newest entries, as by a loss of power: its store is copied while it is stopped, put back later."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import anyio
import pytest

from fleetbus.audit import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
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
from fleetbus.episodes import decode_entries
from fleetbus.errors import UserError
from fleetbus_schemas import CheckpointStored, LineageStarted, PolicyPublished, StepTrained, Subjects, Task, TrainingFinished
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import run_recorder

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


async def copy_store(server: NatsServerProcess, to: Path) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await anyio.to_thread.run_sync(shutil.copytree, server.store, to)
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, CUTS))])
async def test_after_a_log_went_back_in_time_training_goes_on_from_what_it_knows_and_the_audit_names_what_was_lost(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    store = tmp_path / "nats"
    with anyio.fail_after(220):
        async with run_server(store) as server:
            deployment = Deployment(server.url, tmp_path, STEPS)
            async with connect(server.url, run="cut", worker="test") as bus:
                await bus.declare(plan_run("cut", lanes=4))
                async with anyio.create_task_group() as group:
                    drain = anyio.Event()

                    async def run() -> None:
                        await deployment.run(drain, archive=deployment.archive)

                    group.start_soon(run)
                    await wait_for_steps(bus, draw.randint(2, 6))
                    await anyio.sleep(draw.uniform(0.0, 0.3))
                    await copy_store(server, tmp_path / "copy")
                    await wait_for_steps(bus, await count_steps(bus) + draw.randint(4, 8))
                    drain.set()
                before = [entry async for entry in bus.scan([S.policy("default")])]
            await server.kill()
            shutil.rmtree(store)
            shutil.copytree(tmp_path / "copy", store)
            await server.restart()
            reached = max(version.version for _, version in decode_entries(PolicyPublished, before, beside=(LineageStarted,)))
            async with connect(server.url, run="cut", worker="test") as bus:
                known = [entry async for entry in bus.scan([S.train("default")])]
                steps = await count_steps(bus)
                with pytest.raises(UserError, match="lost entries from"):
                    await run_recorder(
                        bus, configuration=deployment.configuration, name="r", drain=anyio.Event(), folder=deployment.archive
                    )
                report = await audit_run(bus, S, archive=deployment.archive)
                lost = next(finding for finding in report.findings if finding.kind == "entries_lost")
                assert lost.count > 20
                assert any(name.startswith("g0000") and name.endswith(": request") for name in lost.ids)

                again = Deployment(server.url, tmp_path, steps + 2)
                await again.run(anyio.Event(), archive=tmp_path / "second")
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
