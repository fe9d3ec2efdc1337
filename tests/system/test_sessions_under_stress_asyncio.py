"""Sessions under stress that only asyncio knows: a cancellation that nobody asked for leaks out of an environment's library."""

from __future__ import annotations

import asyncio

import anyio

from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from tests.support.small_deployment import small_deployment


class LeakyEnvironment(ScriptedEnvironment):
    """Awaits something that its library has cancelled, if the task says so."""

    async def open(self, task: Task) -> None:
        self._leaks = bool(task.config.get("leaks"))
        await super().open(task)

    async def step(self, action: Action) -> Step:
        if self._leaks:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return await super().step(action)


async def test_a_cancellation_that_nobody_asked_for_ends_its_episode_alone() -> None:
    with anyio.fail_after(50):
        async with small_deployment() as fleet:
            worker = fleet.environment("environment-0", make=LeakyEnvironment)
            fleet.inference("inference-0")
            await fleet.request("leaking", task=Task(key="task", config={"leaks": True}))
            await fleet.request("sound")
            leaking, sound = await fleet.result("leaking"), await fleet.result("sound")
            assert (leaking.outcome, leaking.error_class) == ("env_failed", "CancelledError")
            assert sound.outcome == "completed"
            await fleet.request("later")
            assert (await fleet.result("later")).outcome == "completed"
            assert not worker.ended.is_set()
