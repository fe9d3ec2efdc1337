"""A small fleet whose turns take a second, so that things can happen to its workers in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import EpisodeFinished, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.deployment_member import Member
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment

TURN_SECONDS = 1.0
TURNS = 6
PATIENT = LimitSettings(open=60, reset=60, step=60, action=60, verify=60, close=5, drain=10)


def make_slow_sampler() -> ScriptedSampler:
    return ScriptedSampler(delay=lambda _: TURN_SECONDS)


def make_long_task(turns: int = TURNS) -> Task:
    return Task(key="task", prompt="play", config={"turns": turns})


@asynccontextmanager
async def start_deployment(
    *, environments: int = 2, engines: int = 2, make: Callable[[], ScriptedEnvironment] = ScriptedEnvironment
) -> AsyncIterator[SmallDeployment]:
    """Workers that take a second per turn; everything has to rest at the end, with one result per request."""
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            members = [fleet.environment(f"environment-{index}", make=make) for index in range(environments)]
            members += [fleet.inference(f"inference-{index}", sampler=make_slow_sampler()) for index in range(engines)]
            await fleet.heard(*members)
            yield fleet
            await fleet.check_at_rest()
            assert len(fleet.results) == len(fleet.requested), "an episode was lost"
            await check_one_action_per_turn(fleet)


async def check_one_action_per_turn(fleet: SmallDeployment) -> None:
    turns = Counter((action.episode_id, action.attempt, action.turn) for action in await fleet.actions())
    assert set(turns.values()) <= {1}, "an action is stored twice"


async def begin(fleet: SmallDeployment, count: int = 6, *, after: float = 2.5) -> list[str]:
    """Request episodes and let them get under way."""
    episodes = [f"e{index}" for index in range(count)]
    for episode in episodes:
        await fleet.request(episode, task=make_long_task())
    await anyio.sleep(after)
    return episodes


def is_all_completed(results: list[EpisodeFinished]) -> bool:
    return all((result.outcome, result.reward, result.turns) == ("completed", 1.0, TURNS) for result in results)


def has_ended_members(members: list[Member], count: int) -> bool:
    return sum(member.ended.is_set() for member in members) >= count


class BreakingSampler(ScriptedSampler):
    """An engine that breaks for good on a prompt that begins with ``bad``; ``EngineFailed`` if it is said to be gentle."""

    def __init__(self, bad: str, *, gently: bool = False) -> None:
        super().__init__()
        self._bad = list(bad.encode())
        self._gently = gently
        self.tries = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        if list(request.ids[: len(self._bad)]) == self._bad:
            self.tries += 1
            await anyio.sleep(0.5)
            raise EngineFailed("not this one") if self._gently else ZeroDivisionError("the engine is gone")
        return await super().generate(request)
