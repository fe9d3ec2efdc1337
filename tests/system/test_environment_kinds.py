"""One run with several kinds of environments from one tasks file; and servers that die in the middle of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    FleetSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    RunSettings,
)
from fleetbus.core.audit.findings import Report
from fleetbus_schemas import EpisodeFinished, Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.keyed_specs import build_keyed_factory
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.learner.curriculum import load_curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import serve_application
from tests.support.openenv_server import OpenEnvDouble, openenv_double
from tests.support.remote_gym_server import RemoteGymDouble, remote_gym_double
from tests.support.rule_policy import RuleSampler, RuleTemplate
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.tool_calls import ConstantGrader

pytestmark = pytest.mark.integration

WORLDS = {
    "shelves": "warehouse",
    "shop": "shop",
    "words": "echo",
    "sums": "tools",
    "hills": "climb",
    "lakes": "lake",
}
"""Environment keys of the tasks, and the world that their prompts name."""
TASKS_PER_KIND = 4


@pytest.fixture(autouse=True)
def fleet_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)


class EnvironmentServers:
    """The servers, and the specs that lead to them."""

    def __init__(
        self, words: OpenEnvDouble, sums: OpenEnvDouble, hills: RemoteGymDouble, again: Any, shop: str, platform: FleetPlatform
    ) -> None:
        self.words, self.sums, self.hills, self.platform = words, sums, hills, platform
        self.again = again
        self.shop = shop
        self.made: EnvironmentFactory | None = None

    def factory(self) -> EnvironmentFactory:
        specs = (
            "shelves=warehouse",
            f"shop=fleet:{self.shop}",
            f"words=openenv:{self.words.url}",
            f"sums=openenv:{self.sums.url}",
            f"hills=remote-gym:{self.hills.url}",
            "lakes=gym:FrozenLake-v1",
        )
        settings = Configuration(fleet=FleetSettings(verifier="local"))
        make = partial(build_environment_factory, verifier=ConstantGrader(), prompt="compact", configuration=settings)
        return build_keyed_factory("\n".join(specs), make)


@asynccontextmanager
async def start_servers(**remote_gym: Any) -> AsyncIterator[EnvironmentServers]:
    hills, platform = RemoteGymDouble(**remote_gym), FleetPlatform()
    async with (
        serve_application(platform.app) as shop,
        openenv_double() as words,
        openenv_double(world="tools") as sums,
        remote_gym_double(hills) as again,
    ):
        yield EnvironmentServers(words, sums, hills, again, shop.url, platform)


def make_task(key: str, number: int = 0) -> Task:
    config: dict[str, Any] = {"kwargs": {"is_slippery": False}} if key == "lakes" else {}
    if key == "hills":
        config = {"backoff": 0.01, "retries": 0}
    verifier = "def verify(env): return 1" if key in ("shelves", "shop") else None
    return Task(key=f"{key}-{number}", env=key, prompt=f"WORLD={WORLDS[key]}", seed=number, config=config, verifier=verifier)


def write_tasks(file: Path) -> None:
    entries = []
    for key in WORLDS:
        for number in range(TASKS_PER_KIND):
            task = make_task(key, number)
            entry: dict[str, Any] = {"key": task.key, "env_key": task.env, "prompt": task.prompt, "seed": task.seed}
            entries.append(entry | {"config": task.config} | ({"verifier_code": task.verifier} if task.verifier else {}))
    file.write_text(json.dumps({"tasks": entries}))


def configuration(folder: Path, **learner: int) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        episode=EpisodeSettings(max_tokens=128, max_turns=10, max_episode_tokens=16_384),
        inference=InferenceSettings(slots=64, max_model_len=16_384),
        environment=EnvironmentSettings(slots=32),
        limits=LimitSettings(drain=1),
        learner=LearnerSettings(
            **{"steps": 1, "groups": 1, "group_size": 2, "stale_groups": "keep", "max_staleness": 2, **learner}  # type: ignore[arg-type]
        ),
        evaluation=EvaluationSettings(episodes=0),
    )


async def play(folder: Path, **learner: int) -> tuple[Report, list[EpisodeFinished]]:
    """Train on a tasks file with every kind in it; the audit's report, and all results."""
    write_tasks(folder / "tasks.json")
    settings = configuration(folder, **learner)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_server(folder / "nats"))
        fleet = await stack.enter_async_context(
            small_deployment(settings, connect=lambda name: connect(server.url, run=RUN, worker=name), published=False)
        )
        ground = await stack.enter_async_context(start_servers())
        factory = ground.factory()
        await stack.enter_async_context(factory.run())
        workers = [fleet.environment(f"environment-{index}", make=factory) for index in range(2)]
        workers.append(fleet.inference("inference-0", sampler=RuleSampler(), template=RuleTemplate()))
        curriculum = load_curriculum(str(folder / "tasks.json"), seed=1)
        learner_0 = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=curriculum)
        await learner_0.ended.wait()
        assert learner_0.failure() is None
        await fleet.drain_members(workers)
        report = await audit_run(fleet.bus, fleet.subjects)
        results = [result for results in fleet.results.values() for result in results]
        assert (ground.words.active, ground.sums.active, ground.hills.sessions) == (0, 0, {}), "a session was left open"
        assert not ground.platform.running, "an instance was left"
    return report, results


def check(report: Report, results: list[EpisodeFinished], episodes: int) -> None:
    assert report.findings == ()
    assert report.balanced
    assert report.books.trained == episodes
    assert len(results) == len({result.episode_id for result in results}) == report.books.requested >= episodes
    ended = Counter(result.outcome for result in results)
    assert set(ended) <= {"completed", "cancelled"}, ended
    assert {result.env for result in results} == set(WORLDS)
    completed = [result for result in results if result.outcome == "completed"]
    rewards = {key: {result.reward for result in completed if result.env == key} for key in WORLDS}
    assert rewards == {"shelves": {1.0}, "shop": {1.0}, "words": {1.5}, "sums": {1.0}, "hills": {1.0}, "lakes": {1.0}}


async def test_one_run_plays_every_kind_from_one_tasks_file_and_its_books_balance(tmp_path: Path) -> None:
    with anyio.fail_after(55):
        report, results = await play(tmp_path, steps=1, groups=18, group_size=2)
    check(report, results, 36)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_hundred_episodes_of_every_kind_balance(tmp_path: Path) -> None:
    with anyio.fail_after(280):
        report, results = await play(tmp_path, steps=5, groups=20, group_size=2)
    check(report, results, 200)


class Held:
    """Holds the turns of one world, so that its episodes are in the middle when something happens to them."""

    def __init__(self, world: str) -> None:
        self.world = world
        self.waiting = 0
        self.changed = anyio.Event()
        self.released = anyio.Event()

    def __call__(self, world: str, turn: int) -> anyio.Event | None:
        if world != self.world or turn != 1:
            return None
        self.waiting += 1
        self.changed.set()
        self.changed = anyio.Event()
        return self.released

    async def until(self, count: int) -> None:
        while self.waiting < count:
            await self.changed.wait()


@asynccontextmanager
async def playing(folder: Path, held: Held) -> AsyncIterator[tuple[SmallDeployment, EnvironmentServers]]:
    async with small_deployment(configuration(folder)) as fleet, start_servers() as ground:
        factory = ground.factory()
        async with factory.run():
            fleet.environment("environment-0", make=factory)
            fleet.inference("inference-0", sampler=RuleSampler(hold=held), template=RuleTemplate())
            ground.made = factory
            yield fleet, ground
            await fleet.drain_members()


EPISODES = 6


async def request(fleet: SmallDeployment, key: str, name: str) -> None:
    for number in range(EPISODES):
        await fleet.request(f"{name}-{key}-{number}", task=make_task(key, number))


@pytest.mark.parametrize(("key", "world"), [("words", "echo"), ("hills", "climb")])
async def test_a_server_that_dies_fails_the_episodes_on_it_and_nothing_else(tmp_path: Path, key: str, world: str) -> None:
    held = Held(world)
    with anyio.fail_after(55):
        async with playing(tmp_path, held) as (fleet, ground):
            for each in ("lakes", "sums", key):
                await request(fleet, each, "before")
            await held.until(EPISODES)
            if key == "words":
                await ground.words.kill()
            else:
                ground.hills.kill()
            held.released.set()
            await fleet.all_results(3 * EPISODES)
            await (ground.words.start() if key == "words" else ground.again(ground.hills))
            for each in ("lakes", key):
                await request(fleet, each, "after")
            results = await fleet.all_results(5 * EPISODES)
            report = await audit_run(fleet.bus, fleet.subjects)
    outcomes = {result.episode_id: result.outcome for result in results}
    expected = {f"{name}-{each}-{number}": "completed" for name in ("before", "after") for each in ("lakes", "sums", key)
                for number in range(EPISODES) if (name, each) != ("after", "sums")}  # fmt: skip
    expected |= {f"before-{key}-{number}": "env_failed" for number in range(EPISODES)}
    assert outcomes == expected
    failed = [result for result in results if result.outcome == "env_failed"]
    assert {(result.reward, result.error_class) for result in failed} <= {(None, "ConnectionLost"), (None, "ServerUnreachable")}
    assert report.findings == ()


@pytest.mark.parametrize(("key", "replayed"), [("lakes", True), ("hills", False)])
async def test_a_drained_worker_s_episodes_go_on_elsewhere_replayed_or_from_the_start(
    tmp_path: Path, key: str, replayed: bool
) -> None:
    held = Held(WORLDS[key])
    with anyio.fail_after(55):
        async with playing(tmp_path, held) as (fleet, ground):
            await request(fleet, key, "moved")
            await held.until(EPISODES)
            first = fleet.members["environment-0"]
            first.drain.set()
            await first.ended.wait()
            assert ground.made is not None
            fleet.environment("environment-1", make=ground.made)
            held.released.set()
            results = await fleet.all_results(EPISODES)
            claims = [(await fleet.claims(result.episode_id))[-1] for result in results]
            assert ground.hills.executed["connect"] == (2 * EPISODES if key == "hills" else 0)
    assert {(result.outcome, result.reward, result.attempts) for result in results} == {("completed", 1.0, 2)}
    assert {(claim.reason, claim.resumed_at_turn > 0) for claim in claims} == {("handed_back", replayed)}


async def test_a_task_whose_key_nobody_serves_is_named(tmp_path: Path) -> None:
    with anyio.fail_after(55):
        async with playing(tmp_path, Held("none")) as (fleet, _):
            await fleet.request("e", task=Task(key="t", env="moon", prompt="WORLD=echo"))
            result = await fleet.result("e")
    assert (result.outcome, result.reward, result.error_class) == ("env_failed", None, "EnvironmentFailed")
    assert "no environment for the key 'moon' of task t; this worker serves hills, lakes, s" in result.error
