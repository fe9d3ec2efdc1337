"""One inference worker for two runs on a server with keys: both train, and what one of them meets does not end the other."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, NatsSettings, RunSettings
from fleetbus.delivery.fair_shares import Share
from fleetbus.delivery.shared_slots import SharedSlots
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import StepTrained, Subjects, Task
from fleetbus_workers.assembly.shared_inference import ServedRun, serve_runs
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from tests.support.servers import RunningServers, running_servers

RUNS = ("alpha", "beta")
STEPS, GROUPS, GROUP_SIZE = 2, 2, 4


def configured(run: str, folder: Path) -> Configuration:
    return Configuration(
        run=RunSettings(name=run, folder=str(folder)),
        nats=NatsSettings(lanes=4, max_bytes=1 << 28),
        learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=2, max_staleness=2),
        evaluation=EvaluationSettings(episodes=0),
    )


async def train(servers: RunningServers, run: str, folder: Path) -> list[StepTrained]:
    configuration, drain = configured(run, folder), anyio.Event()
    tasks = [Task(key=f"t{index}", prompt=f"task {index}") for index in range(4)]

    async def play(bus: Bus) -> None:
        await run_environment(bus, configuration=configuration, name="environment-0", drain=drain, make=ScriptedEnvironment)

    async with (
        servers.connect(run, "environment-0") as played,
        servers.connect(run, "learner-0") as trained,
        anyio.create_task_group() as group,
    ):
        group.start_soon(play, played)
        await run_learner(
            trained,
            configuration=configuration,
            name="learner-0",
            drain=anyio.Event(),
            trainer=ScriptedTrainer(),
            curriculum=Curriculum(tasks, tasks, seed=1),
        )
        drain.set()
    async with servers.connect(run, "admin-0") as bus:
        report = await audit_run(bus, Subjects(run))
        assert report.balanced, report.findings
        return [step for _, step in decode_entries(StepTrained, await bus.history([Subjects(run).train("default")]))]


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_two_runs_train_on_one_worker_beside_a_third_that_cannot_be_served(tmp_path: Path) -> None:
    plans = [plan_run(run, lanes=4, max_bytes=1 << 28) for run in RUNS]
    steps: dict[str, list[StepTrained]] = {}
    stop = anyio.Event()
    async with running_servers(tmp_path, plans) as servers:
        for plan in plans:
            await servers.declare(plan)

        async def serve(run: ServedRun, shared: SharedSlots, drain: anyio.Event) -> None:
            if run.name == "gone":
                raise UserError("no run gone on this server")
            async with servers.connect(run.name, "inference-0") as bus:
                await run_inference(
                    bus,
                    configuration=run.configuration,
                    name="inference-0",
                    drain=drain,
                    sampler=ScriptedSampler(),
                    template=ScriptedTemplate(),
                    shared=shared,
                )

        async def learn(run: str) -> None:
            steps[run] = await train(servers, run, tmp_path)
            if len(steps) == len(RUNS):
                stop.set()

        served = [
            ServedRun(configuration=configured(run, tmp_path), url=servers.url, share=Share(weight=weight))
            for run, weight in (("alpha", 3.0), ("beta", 1.0), ("gone", 1.0))
        ]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for run in RUNS:
                    group.start_soon(learn, run)
                await serve_runs(served, serve, slots=8, drain=stop)
        assert await servers.violations() == []
    for run in RUNS:
        trained = [episode for step in steps[run] for episode in step.episodes]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS * GROUP_SIZE


async def test_when_no_run_is_left_that_works_the_process_ends_as_the_last_one_did(tmp_path: Path) -> None:
    async def serve(run: ServedRun, shared: SharedSlots, drain: anyio.Event) -> None:
        raise UserError(f"no run {run.name} on this server")

    served = [ServedRun(configuration=configured(run, tmp_path), url="", share=Share()) for run in RUNS]
    with pytest.raises(BaseExceptionGroup) as caught, anyio.fail_after(10):
        await serve_runs(served, serve, slots=8, drain=anyio.Event())
    assert "no run beta" in repr(caught.value)
