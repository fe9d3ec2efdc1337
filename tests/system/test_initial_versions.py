"""The version that an episode begins with: one that was published before it was asked for, even while that is being loaded."""

from __future__ import annotations

import anyio

from fleetbus_schemas import PolicyPublished, Task
from fleetbus_workers.inference.base import WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import SmallDeployment, small_deployment
from tests.support.virtual_time import virtual_time

LOADING_SECONDS = 2.0

anyio_backend = virtual_time


class SlowToLoad(ScriptedSampler):
    """Takes its time for every version after the first, and rejects version 2."""

    def __init__(self) -> None:
        super().__init__(delay=lambda _: 0.2)
        self.loading = anyio.Event()

    async def load(self, policy: PolicyPublished) -> None:
        if policy.version:
            self.loading.set()
            await anyio.sleep(LOADING_SECONDS)
        if policy.version == 2:
            raise WeightsRejected("no good")
        await super().load(policy)


async def begun(fleet: SmallDeployment) -> SlowToLoad:
    sampler = SlowToLoad()
    await fleet.heard(fleet.environment("environment-0"), fleet.inference("inference-0", sampler=sampler))
    await fleet.until(lambda: fleet.beats["inference-0"].counters.get("versions_loaded") == 1)
    return sampler


async def test_an_episode_asked_for_after_a_version_waits_for_it_and_one_from_before_does_not() -> None:
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            sampler = await begun(fleet)
            started = anyio.current_time()
            await fleet.request("before", task=Task(key="before", prompt="play", config={"turns": 6}))
            await fleet.publish_policy(1)
            await sampler.loading.wait()
            await fleet.request("after", task=Task(key="after", prompt="play", config={"turns": 1}))
            assert (await fleet.result("before")).policy_versions == (0,)
            assert anyio.current_time() - started < LOADING_SECONDS
            assert (await fleet.result("after")).policy_versions == (1,)


async def test_nobody_waits_for_a_version_that_is_rejected() -> None:
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            sampler = await begun(fleet)
            await fleet.publish_policy(2)
            await sampler.loading.wait()
            await fleet.request("after")
            assert (await fleet.result("after")).policy_versions == (0,)
