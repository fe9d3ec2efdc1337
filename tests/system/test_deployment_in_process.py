"""A whole fleet in one process: real workers, scripted environment, engine and trainer, on the bus in memory and on NATS."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, NatsSettings, RunSettings
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import EpisodeFinished, EvaluationFinished, StepTrained, Subjects, Task, TrainingFinished
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from tests.support.servers import connect, run_server

Connect = Callable[[str], AbstractAsyncContextManager[Bus]]


def configured(folder: Path, **learner: Any) -> Configuration:
    return Configuration(
        run=RunSettings(name="fleet", folder=str(folder)),
        nats=NatsSettings(lanes=4, max_bytes=1 << 28),
        learner=LearnerSettings(
            **{"steps": 3, "groups": 4, "group_size": 4, "checkpoint_every": 2, "max_staleness": 2, **learner}
        ),
        evaluation=EvaluationSettings(episodes=8),
    )


@asynccontextmanager
async def memory_connections() -> AsyncIterator[Connect]:
    server = MemoryServer()
    yield lambda worker: server.connect("fleet", worker=worker)


@asynccontextmanager
async def nats_connections(store: Path) -> AsyncIterator[Connect]:
    async with run_server(store) as server:
        yield lambda worker: connect(server.url, run="fleet", worker=worker)


@pytest.fixture(params=["memory", "nats"])
async def connections(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    made = memory_connections() if request.param == "memory" else nats_connections(tmp_path / "nats")
    async with made as connections:
        yield connections


async def work(connect: Connect, configuration: Configuration, role: str, name: str, drain: anyio.Event) -> None:
    async with connect(name) as bus:
        if role == "environment":
            await run_environment(bus, configuration=configuration, name=name, drain=drain, make=ScriptedEnvironment)
        else:
            await run_inference(
                bus,
                configuration=configuration,
                name=name,
                drain=drain,
                sampler=ScriptedSampler(),
                template=ScriptedTemplate(),
            )


async def train(connect: Connect, configuration: Configuration, name: str = "learner-0") -> ScriptedTrainer:
    tasks = [Task(key=f"task-{index}", prompt=f"task {index}") for index in range(8)]
    trainer = ScriptedTrainer()
    async with connect(name) as bus:
        await run_learner(
            bus,
            configuration=configuration,
            name=name,
            drain=anyio.Event(),
            trainer=trainer,
            curriculum=Curriculum(tasks, tasks, seed=1),
        )
    return trainer


@pytest.mark.integration
async def test_a_fleet_trains_every_requested_episode_once(connections: Connect, tmp_path: Path) -> None:
    configuration = configured(tmp_path)
    subjects = Subjects("fleet")
    drain = anyio.Event()
    with anyio.fail_after(50):
        async with connections("test") as bus:
            await bus.declare(plan_run("fleet", lanes=4, max_bytes=1 << 28))
            async with anyio.create_task_group() as group:
                for index in range(2):
                    group.start_soon(work, connections, configuration, "environment", f"environment-{index}", drain)
                    group.start_soon(work, connections, configuration, "inference", f"inference-{index}", drain)
                trainer = await train(connections, configuration)
                drain.set()
            steps = [step for _, step in decode_entries(StepTrained, await bus.history([subjects.train("default")]))]
            results = [
                entry
                async for stored in bus.scan([subjects.episodes])
                if isinstance(entry := decode_episode_entry(stored), EpisodeFinished)
            ]
    trained = [episode for step in steps for episode in step.episodes]
    assert len(steps) == 3
    assert trained == trainer.trained
    assert len(trained) == len(set(trained)) == 3 * 4 * 4
    assert Counter(result.outcome for result in results) == {"completed": 48 + 3 * 8}
    assert {result.reward for result in results} == {1.0}


async def test_a_run_ends_with_its_evaluations_in_the_log(connections: Connect, tmp_path: Path) -> None:
    configuration = configured(tmp_path, steps=1)
    drain = anyio.Event()
    with anyio.fail_after(50):
        async with connections("test") as bus:
            await bus.declare(plan_run("fleet", lanes=4, max_bytes=1 << 28))
            async with anyio.create_task_group() as group:
                group.start_soon(work, connections, configuration, "environment", "environment-0", drain)
                group.start_soon(work, connections, configuration, "inference", "inference-0", drain)
                await train(connections, configuration)
                drain.set()
            entries = await bus.history([Subjects("fleet").train("default")])
    evaluations = [message for _, message in decode_entries(EvaluationFinished, entries)]
    assert [evaluation.name for evaluation in evaluations][:1] == ["start"]
    assert {evaluation.name for evaluation in evaluations} == {"start", "end", "end_greedy"}
    assert all(evaluation.success == 1.0 and evaluation.graded == 8 for evaluation in evaluations)
    assert [message.step for _, message in decode_entries(TrainingFinished, entries)] == [1]
