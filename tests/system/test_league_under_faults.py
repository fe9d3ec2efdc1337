"""A league whose learners begin again, whose store is away, and whose worker dies: opponents stay who they were asked to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration, EvaluationSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import EpisodeFinished, LineageStarted, PolicyPublished, Task
from fleetbus_workers.inference.base import WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from tests.support.balanced_log import expect_balance
from tests.support.deployment_member import Member
from tests.support.small_deployment import LIMITS, SmallDeployment, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_league import (
    STEPS,
    TASKS,
    Counting,
    Duel,
    configure,
    expect_played_as_requested,
    name_opponents,
    read_requests,
    read_steps,
    start_learner,
    start_workers,
)

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

PATIENT = replace(LIMITS, action=300, episode=600)


async def wait_for_steps(fleet: SmallDeployment, count: int) -> None:
    async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
        while count:
            count -= b"StepTrained" in (await reader.receive()).payload


async def read_versions(fleet: SmallDeployment) -> dict[int, PolicyPublished]:
    published = [entry async for entry in fleet.bus.scan([fleet.subjects.policy("default")])]
    return {each.version: each for _, each in decode_entries(PolicyPublished, published, beside=(LineageStarted,))}


async def end(member: Member) -> None:
    member.kill()
    await member.ended.wait()


async def test_a_learner_on_an_empty_disk_holds_out_against_the_version_of_the_learner_before(tmp_path: Path) -> None:
    configuration = replace(configure(tmp_path), evaluation=EvaluationSettings(episodes=2, every=1))
    async with small_deployment(configuration, published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet, held_out=[Task(key="held-out")])
        await wait_for_steps(fleet, 3)
        await end(learner)
        shutil.rmtree(policy_folder(configuration.run).weights)
        await start_learner(fleet, "learner-1", held_out=[Task(key="held-out")]).ended.wait()
        held_out = [request for request in await read_requests(fleet) if request.split == "eval"]
        assert len({request.lineage for request in held_out}) == 2
        assert {request.seats[0].version for request in held_out} == {0}
        await expect_balance(fleet)


async def test_the_files_of_opponents_stay_while_requests_name_them_however_many_learners_begin(tmp_path: Path) -> None:
    configuration = configure(tmp_path)
    async with small_deployment(configuration, published=False) as fleet:
        start_workers(fleet)
        learner = start_learner(fleet)
        await wait_for_steps(fleet, 3)
        await end(fleet.members["environment"])
        await end(learner)
        weights = policy_folder(configuration.run).weights
        for number in range(15):
            learner = start_learner(fleet, f"learner-{number}")
            start = (await fleet.bus.log_state()).last_sequence + 1
            async with fleet.bus.read([fleet.subjects.policy("default")], start=start) as reader:
                while b"PolicyPublished" not in (await reader.receive()).payload:
                    pass
            await anyio.sleep(1)
            await end(learner)
        results = {entry.subject.rpartition(".")[2] async for entry in fleet.bus.scan([fleet.subjects.episodes])}
        unplayed = [request for request in await read_requests(fleet) if request.episode_id not in results]
        named = set.union(*name_opponents(unplayed).values())
        assert named - {0}, "the first one stays anyway"
        for version in named:
            assert list(weights.glob(f"*-v{version:06d}.safetensors")), f"{version} of {sorted(weights.iterdir())}"


async def test_versions_that_a_person_took_back_are_no_opponents_and_not_rated(tmp_path: Path) -> None:
    configuration = configure(tmp_path, "uniform:9")
    async with small_deployment(configuration, published=False) as fleet:
        start_workers(fleet)
        await start_learner(fleet).ended.wait()
        void = {version for version, each in (await read_versions(fleet)).items() if each.step > 2}
        assert len(void) == 4
        again = replace(configuration, learner=replace(configuration.learner, restart_from="2", steps=12))
        curriculum = Curriculum(TASKS, (), seed=1)
        await fleet.learner("learner-1", trainer=Counting(), curriculum=curriculum, configuration=again).ended.wait()
        asked = [request for request in await read_requests(fleet) if request.lineage == "l2"]
        assert len(asked) > 8
        assert not void & {request.seats[0].version for request in asked}
        assert len({request.seats[0].version for request in asked}) > 2
        assert (await read_steps(fleet))[-1].metrics["league_rating"] is not None
        await expect_balance(fleet)


class Reading(ScriptedSampler):
    """An engine that needs the file of a version."""

    async def load(self, policy: PolicyPublished) -> None:
        if not Path(policy.uri.removeprefix("file://")).exists():  # noqa: ASYNC240 - virtual time runs on while a thread looks
            raise WeightsRejected(f"{policy.uri} is gone")
        await super().load(policy)


@pytest.mark.parametrize("before", ["", "second=league:uniform:1"])
async def test_a_league_that_begins_late_or_grows_draws_nobody_whose_file_is_gone(tmp_path: Path, before: str) -> None:
    configuration = replace(configure(tmp_path, "uniform:40"), limits=PATIENT)
    small = replace(configuration, run=replace(configuration.run, seats=before))
    assert small.learner.keep_weights < STEPS
    async with small_deployment(configuration, published=False) as fleet:
        fleet.environment("environment", make=Duel)
        fleet.inference("inference")
        fleet.inference("inference-second", policy="second", sampler=Reading())
        curriculum = Curriculum(TASKS, (), seed=1)
        longer = replace(small, learner=replace(small.learner, steps=3 * STEPS))
        first = fleet.learner("learner", trainer=Counting(), curriculum=curriculum, configuration=longer)
        await wait_for_steps(fleet, 2 * STEPS)
        await end(first)
        longer = replace(configuration, learner=longer.learner)
        await fleet.learner("learner-1", trainer=Counting(), curriculum=curriculum, configuration=longer).ended.wait()
        assert {result.outcome for result in await read_results(fleet)} == {"completed"}
        drawn = {request.seats[0].version for request in await read_requests(fleet) if request.lineage == "l2"}
        assert len(drawn) > 3


class Stored(ScriptedSampler):
    """An engine whose versions come from a store, which calls ``on_load`` for each."""

    def __init__(self, on_load: Callable[[int], float]) -> None:
        super().__init__()
        self._on_load = on_load

    async def load(self, policy: PolicyPublished) -> None:
        await anyio.sleep(self._on_load(policy.version))
        await super().load(policy)


def patient(folder: Path) -> Configuration:
    return replace(configure(folder), limits=PATIENT)


async def read_results(fleet: SmallDeployment) -> list[EpisodeFinished]:
    return await fleet._all(EpisodeFinished, fleet.subjects.episodes)


async def test_no_episode_is_lost_while_the_store_is_away_for_a_minute(tmp_path: Path) -> None:
    async with small_deployment(patient(tmp_path), published=False) as fleet:
        away_until = anyio.current_time() + 60

        def load(version: int) -> float:
            if anyio.current_time() < away_until:
                raise WeightsRejected("the store is away")
            return 0.0

        fleet.environment("environment", make=Duel)
        fleet.inference("inference")
        fleet.inference("inference-second", policy="second", sampler=Stored(load))
        learner = start_learner(fleet)
        await learner.ended.wait()
        assert learner.error is None
        assert {result.outcome for result in await read_results(fleet)} == {"completed"}
        await expect_played_as_requested(fleet)


async def test_a_version_that_is_damaged_costs_its_own_episodes_and_nobody_elses(tmp_path: Path) -> None:
    async with small_deployment(patient(tmp_path), published=False) as fleet:

        def load(version: int) -> float:
            if version == 1:
                raise WeightsRejected("differs from the manifest's sha256")
            return 0.0

        fleet.environment("environment", make=Duel)
        fleet.inference("inference")
        worker = fleet.inference("inference-second", policy="second", sampler=Stored(load))
        await start_learner(fleet).ended.wait()
        assert not worker.ended.is_set()
        asked = {request.episode_id: request.seats[0].version for request in await read_requests(fleet)}
        results = await read_results(fleet)
        assert 1 in asked.values()
        for result in results:
            ended_as = ("lost", "version_gone") if asked[result.episode_id] == 1 else ("completed", "")
            assert (result.outcome, result.error_class) == ended_as
        await expect_balance(fleet)


async def test_episodes_go_on_when_the_worker_is_killed_in_the_midst_of_a_load(tmp_path: Path) -> None:
    async with small_deployment(patient(tmp_path), published=False) as fleet:
        loading = anyio.Event()

        def load(version: int) -> float:
            loading.set()
            return 5.0

        fleet.environment("environment", make=Duel)
        fleet.inference("inference")
        killed = fleet.inference("inference-second", policy="second", sampler=Stored(load))
        learner = start_learner(fleet)
        await loading.wait()
        await end(killed)
        fleet.inference("inference-second-1", policy="second", sampler=Stored(lambda version: 5.0))
        await learner.ended.wait()
        assert learner.error is None
        assert {result.outcome for result in await read_results(fleet)} == {"completed"}
        await expect_played_as_requested(fleet)
        await expect_balance(fleet)
