"""A small fleet whose turns take a second, so that things can happen to its workers in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import EpisodeFinished, Task
from fleetbus_workers.environment.scripted import ScriptedEnvironment
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_fleet import Member, SmallFleet, configured, small_fleet

TURN_SECONDS = 1.0
TURNS = 6
PATIENT = LimitSettings(open=60, reset=60, step=60, action=60, verify=60, close=5, drain=10)


def slow_sampler() -> ScriptedSampler:
    return ScriptedSampler(delay=lambda _: TURN_SECONDS)


def long_task(turns: int = TURNS) -> Task:
    return Task(key="task", prompt="play", config={"turns": turns})


@asynccontextmanager
async def fleet_of(
    *, environments: int = 2, engines: int = 2, make: Callable[[], ScriptedEnvironment] = ScriptedEnvironment
) -> AsyncIterator[SmallFleet]:
    """Workers that take a second per turn; everything has to rest at the end, with one result per request."""
    with anyio.fail_after(2000):
        async with small_fleet(configured(limits=PATIENT)) as fleet:
            members = [fleet.environment(f"environment-{index}", make=make) for index in range(environments)]
            members += [fleet.inference(f"inference-{index}", sampler=slow_sampler()) for index in range(engines)]
            await fleet.heard(*members)
            yield fleet
            await fleet.rests()
            assert len(fleet.results) == len(fleet.requested), "an episode was lost"
            await one_action_per_turn(fleet)


async def one_action_per_turn(fleet: SmallFleet) -> None:
    turns = Counter((action.episode_id, action.attempt, action.turn) for action in await fleet.actions())
    assert set(turns.values()) <= {1}, "an action is stored twice"


async def begin(fleet: SmallFleet, count: int = 6, *, after: float = 2.5) -> list[str]:
    """Request episodes and let them get under way."""
    episodes = [f"e{index}" for index in range(count)]
    for episode in episodes:
        await fleet.request(episode, task=long_task())
    await anyio.sleep(after)
    return episodes


def all_completed(results: list[EpisodeFinished]) -> bool:
    return all((result.outcome, result.reward, result.turns) == ("completed", 1.0, TURNS) for result in results)


def at_least_ended(members: list[Member], count: int) -> bool:
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
