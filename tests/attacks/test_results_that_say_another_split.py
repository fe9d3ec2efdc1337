"""With one environment worker's key: results that name another split or group than their request did hold nobody up, and
episodes that nobody asked for, and rewards out of bounds, are no part of an evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration, NatsSettings, RunSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus.delivery.requests import Requests
from fleetbus_schemas import EpisodeFinished, EvaluationFinished, Exclusion, Split, Task, encode
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.results import Results
from tests.support.backends import asyncio_alone
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

anyio_backend = asyncio_alone

CONFIGURATION = Configuration(run=RunSettings(name=TRUST), nats=NatsSettings(lanes=LANES, max_bytes=1 << 28))
PATIENCE_SECONDS = 10.0
TASK = Task(key="t", prompt="p")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


class Learner:
    """The parts of a learner that ask for episodes and read results."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.pool = GroupPool(Ledger(), minimum=1, max_staleness=0)
        self.requests = Requests(bus, SUBJECTS, configuration=CONFIGURATION, worker="learner-0")
        self.evaluations = Evaluations(self.requests)
        self.results = Results(bus, SUBJECTS, self.requests, self.pool, self.evaluations, defaultdict(float))


@asynccontextmanager
async def learning(secured: SecuredServer) -> AsyncIterator[Learner]:
    async with secured.connect("learner") as bus, anyio.create_task_group() as group:
        learner = Learner(bus)
        group.start_soon(learner.results.follow, 1)
        yield learner
        group.cancel_scope.cancel()


async def store(bus: Bus, episode: str, group: str, split: Split, **changes: Any) -> None:
    result = EpisodeFinished(
        episode_id=episode, group_id=group, attempt=0, outcome="env_failed", worker="thief", split=split, task_key="t"
    )
    await bus.publish(SUBJECTS.episode(episode), encode(msgspec.structs.replace(result, **changes)), expected_last=0)


async def test_a_group_whose_results_say_that_they_are_of_an_evaluation_ends_all_the_same(secured: SecuredServer) -> None:
    """The learner that asked had taken it for answered, and waited for its group without end."""
    async with learning(secured) as learner, secured.connect("environment") as thief:
        learner.pool.admit("g000001", 1)
        request = learner.requests.build_request(
            TASK,
            episode_id="g000001-0",
            group_id="g000001",
            sample_index=0,
            group_size=1,
            split="train",
            lineage="l1",
            version=0,
        )
        learner.pool.expect(request.episode_id, request.group_id, request.deadline_ns)
        stored = await learner.requests.publish(request)
        learner.pool.register_request(request.episode_id, stored.sequence)
        await store(thief, "g000001-0", "g000001", "eval")
        with anyio.fail_after(PATIENCE_SECONDS):
            while learner.pool.group_ids:
                await learner.pool.changed.wait()
    assert learner.pool.take_exclusions() == [Exclusion(episode_id="g000001-0", reason="env_failed")]


@pytest.mark.parametrize(("split", "group"), [("train", ""), ("eval", "another")])
async def test_an_evaluation_ends_whatever_group_and_split_its_results_name(
    secured: SecuredServer, split: Split, group: str
) -> None:
    async with learning(secured) as learner, secured.connect("environment") as thief:
        name = f"odd{split}"
        told = await play(learner, thief, name, {f"l1-{name}-0000": (split, group or f"l1-{name}")})
    assert (told.episodes, told.graded) == (1, 0)


async def test_episodes_that_nobody_asked_for_are_no_part_of_an_evaluation(secured: SecuredServer) -> None:
    """They took the places of those that were asked for: success as whoever stored them liked it."""
    async with learning(secured) as learner, secured.connect("environment") as thief:
        forged: dict[str, Any] = {"outcome": "completed", "reward": 1.0, "success": True}
        await store(thief, "forged", "l1-held", "eval", **forged)
        told = await play(
            learner, thief, "held", {"forged-too": ("eval", "l1-held"), "l1-held-0000": ("eval", "l1-held")}, **forged
        )
    assert (told.episodes, told.graded, told.success) == (1, 0, 0.0)


@pytest.mark.parametrize("reward", [1e308, -math.inf, math.nan])
async def test_a_reward_out_of_bounds_is_no_part_of_an_evaluation(secured: SecuredServer, reward: float) -> None:
    """The mean of the others would be that, too."""
    async with learning(secured) as learner, secured.connect("environment") as thief:
        name = f"mean{reward}".replace("+", "")
        told = await play(
            learner, thief, name, {f"l1-{name}-0000": ("eval", f"l1-{name}")}, only="", outcome="completed", reward=reward
        )
    assert (told.graded, told.mean_reward) == (0, 0.0)


async def play(
    learner: Learner, thief: Bus, name: str, answers: dict[str, tuple[Split, str]], only: str = "forged", **forged: Any
) -> EvaluationFinished:
    """The verdict of an evaluation of one task; ``answers``: split and group that the result of each episode names. Names that
    begin with ``only`` have what is ``forged``."""
    told: list[EvaluationFinished | None] = []

    async def evaluate() -> None:
        told.append(await learner.evaluations.play(name, [TASK], lineage="l1", step=0, version=0, temperature=1.0))

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group, learner.bus.read([SUBJECTS.tasks()], start=1) as requests:
            group.start_soon(evaluate)
            while not (await requests.receive()).subject.endswith(f".l1-{name}-0000"):
                continue
            for episode, (split, named) in answers.items():
                await store(thief, episode, named, split, **(forged if episode.startswith(only) else {}))
    assert told[0] is not None
    return told[0]
