"""Two kinds of environments in one run, each played by workers of its own, on a server with keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.config.pools import list_pools
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EvaluationSettings,
    LearnerSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus_schemas import EpisodeFinished, StepTrained, Subjects, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.keyed_specs import KeyedEnvironments
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from tests.support.servers import RunningServers, running_servers

KINDS = ("browser", "gpu")
STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
S = Subjects("fleet")


class Factory:
    """Makes scripted environments of one kind; nothing is open beside them."""

    def __call__(self) -> ScriptedEnvironment:
        return ScriptedEnvironment()


def configured(folder: Path, pool: str) -> Configuration:
    return Configuration(
        run=RunSettings(name="fleet", folder=str(folder), pool=pool),
        nats=NatsSettings(lanes=4, max_bytes=1 << 28),
        learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=2, max_staleness=2),
        evaluation=EvaluationSettings(episodes=0),
    )


async def play(servers: RunningServers, configuration: Configuration, kind: str, pools: str, drain: anyio.Event) -> None:
    """A worker that has the environments of one kind, and no others."""
    settings = EnvironmentSettings(pools=pools)
    name = f"environment-{kind}"
    async with servers.connect("fleet", name) as bus:
        await run_environment(
            bus,
            configuration=msgspec.structs.replace(configuration, environment=settings),
            name=name,
            drain=drain,
            make=KeyedEnvironments({kind: Factory()}),  # type: ignore[dict-item]
        )


async def sample(servers: RunningServers, configuration: Configuration, drain: anyio.Event) -> None:
    async with servers.connect("fleet", "inference-0") as bus:
        await run_inference(
            bus,
            configuration=configuration,
            name="inference-0",
            drain=drain,
            sampler=ScriptedSampler(),
            template=ScriptedTemplate(),
        )


async def train(bus: Bus, configuration: Configuration) -> None:
    tasks = [Task(key=f"{kind}-{index}", env=kind, prompt=f"task {index}") for index in range(4) for kind in KINDS]
    await run_learner(
        bus,
        configuration=configuration,
        name="learner-0",
        drain=anyio.Event(),
        trainer=ScriptedTrainer(),
        curriculum=Curriculum(tasks, tasks, seed=1),
    )


async def train_two_kinds(folder: Path, *, pool: str, served: tuple[str, str]) -> tuple[Counter[str], list[str], Counter[str]]:
    """The outcomes of all episodes, those that were trained, and how many each worker finished. ``served`` are the pools of the
    browser's worker and of the GPU's."""
    configuration = configured(folder, pool)
    plan = plan_run("fleet", pools=list_pools(configuration.run), lanes=4, max_bytes=1 << 28)
    drain = anyio.Event()
    with anyio.fail_after(50):
        async with running_servers(folder, [plan]) as servers:
            await servers.declare(plan)
            async with anyio.create_task_group() as group:
                for kind, pools in zip(KINDS, served, strict=True):
                    group.start_soon(play, servers, configuration, kind, pools, drain)
                group.start_soon(sample, servers, configuration, drain)
                async with servers.connect("fleet", "learner-0") as bus:
                    await train(bus, configuration)
                drain.set()
            async with servers.connect("fleet", "monitor-0") as bus:
                steps = [step for _, step in decode_entries(StepTrained, await bus.history([S.train("default")]))]
                entries = [decode_episode_entry(entry) async for entry in bus.scan([S.episodes])]
            assert await servers.violations() == []
    results = [entry for entry in entries if isinstance(entry, EpisodeFinished)]
    trained = [episode for step in steps for episode in step.episodes]
    return Counter(each.outcome for each in results), trained, Counter(f"{each.worker} {each.env}" for each in results)


@pytest.mark.timeout(120)
async def test_two_kinds_of_workers_play_the_episodes_of_their_own_pool_and_none_fails(tmp_path: Path) -> None:
    outcomes, trained, played = await train_two_kinds(tmp_path, pool="gpu=gpu", served=("default", "gpu"))
    assert set(outcomes) == {"completed"}
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * GROUP_SIZE
    assert set(played) == {"environment-browser browser", "environment-gpu gpu"}
