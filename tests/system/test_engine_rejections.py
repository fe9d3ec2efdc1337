"""A request that an engine can never answer ends its episode with the reason, and is not tried elsewhere."""

from __future__ import annotations

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus_schemas import EngineLoad, PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, RequestRefused, WeightsRejected
from fleetbus_workers.inference.engine_meter import EngineMeter
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.deployment_member import Member
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


class Busy(ScriptedSampler):
    """Has sampled 40 tokens more each time that it is asked."""

    engine_load = EngineLoad(running=5, waiting=2, kv_cache_use=0.25, preemptions=1)

    def __init__(self) -> None:
        super().__init__()
        self.sampled = 0.0

    @property
    def stats(self) -> dict[str, float]:
        self.sampled += 40
        return {"sampled_tokens": self.sampled, "cached_tokens": 3 * self.sampled, "prefill_tokens": self.sampled}


async def test_how_busy_an_engine_is_comes_with_the_heartbeat_and_with_rates_of_the_seconds_since_the_last() -> None:
    sampler = Busy()
    meter = EngineMeter(sampler, 100.0)
    load = meter.measure(102.0)
    assert load == msgspec.structs.replace(sampler.engine_load, tokens_per_second=20.0, prefix_hits=0.75)
    assert meter.measure(102.1) == load, "a heartbeat that follows at once repeats the rates"
    assert EngineMeter(ScriptedSampler(), 0.0).measure(9.0) is None, "an engine that tells nothing adds nothing"
    with anyio.fail_after(600):
        async with small_deployment() as fleet:
            await fleet.heard(fleet.inference("inference-0", sampler=sampler))
            assert fleet.beats["inference-0"].engine == sampler.engine_load


async def test_what_an_engine_counts_is_published_with_the_heartbeat() -> None:
    with anyio.fail_after(600):
        async with small_deployment() as fleet:
            await fleet.heard(fleet.inference("inference-0", sampler=Refusing()))
            assert fleet.beats["inference-0"].counters["engine_cached_tokens"] == 3.0


async def test_what_an_engine_rejected_is_fetched_anew() -> None:
    """It may have been damaged on its way, and would be again and again what it was."""
    discarded: list[float] = []

    class Damaged(ScriptedSampler):
        async def load(self, policy: PolicyPublished) -> None:
            if not discarded:
                raise WeightsRejected("differs from the manifest's sha256")
            await super().load(policy)

    with anyio.fail_after(600):
        async with small_deployment() as fleet:

            async def work(member: Member, bus: Bus) -> None:
                await run_inference(
                    bus,
                    configuration=fleet.configuration,
                    name="inference-0",
                    drain=member.drain,
                    sampler=Damaged(),
                    template=ScriptedTemplate(),
                    runtime=fleet.runtime,
                    discard_copies=lambda: discarded.append(anyio.current_time()),
                )

            fleet.start("inference", "inference-0", work)
            fleet.environment("environment-0")
            await fleet.request()
            assert (await fleet.result()).outcome == "completed"
    assert len(discarded) == 1
