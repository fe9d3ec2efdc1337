"""A request that an engine can never answer ends its episode with the reason, and is not tried elsewhere."""

from __future__ import annotations

import anyio

from fleetbus_workers.inference.base import Generation, GenerationRequest, RequestRefused
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


class Refusing(ScriptedSampler):
    """Serves evaluation only, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []
        self.stats = {"cached_tokens": 3.0}

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request.trained)
        raise RequestRefused("this engine serves evaluation only")


async def test_a_refused_request_ends_its_episode_once_with_the_reason() -> None:
    sampler = Refusing()
    with anyio.fail_after(600):
        async with small_deployment() as fleet:
            await fleet.heard(fleet.environment("environment-0"), fleet.inference("inference-0", sampler=sampler))
            await fleet.request()
            result = await fleet.result()
    assert (result.outcome, result.error_class, result.error) == (
        "lost",
        "engine_refused",
        "this engine serves evaluation only",
    )
    assert sampler.asked == [True]


async def test_what_an_engine_counts_is_published_with_the_heartbeat() -> None:
    with anyio.fail_after(600):
        async with small_deployment() as fleet:
            await fleet.heard(fleet.inference("inference-0", sampler=Refusing()))
            assert fleet.beats["inference-0"].counters["engine_cached_tokens"] == 3.0
