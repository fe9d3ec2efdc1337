"""A worker that cannot work says why in its heartbeats, for as long as that lasts."""

from __future__ import annotations

import anyio
import pytest

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.base import EngineFailed, Generation, GenerationRequest, WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import small_deployment

pytestmark = pytest.mark.integration


class Refusing(ScriptedSampler):
    """Rejects every version until it is mended."""

    is_mended = False

    async def load(self, policy: PolicyPublished) -> None:
        if not self.is_mended:
            raise WeightsRejected("sha256 of lm_head.weight differs")
        await super().load(policy)


class Dead(ScriptedSampler):
    """Answers nothing until it is mended."""

    is_mended = False

    async def generate(self, request: GenerationRequest) -> Generation:
        if not self.is_mended:
            raise EngineFailed("nothing answers\nat http://127.0.0.1:9")
        return await super().generate(request)


async def test_rejected_weights_are_a_problem_until_they_are_loaded() -> None:
    sampler = Refusing()
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            fleet.inference("inference-0", sampler=sampler)
            await fleet.until(lambda: "inference-0" in fleet.beats and bool(fleet.beats["inference-0"].problem))
            assert "rejected: sha256 of lm_head.weight differs" in fleet.beats["inference-0"].problem
            sampler.is_mended = True
            await fleet.until(lambda: not fleet.beats["inference-0"].problem)


async def test_a_dead_engine_is_a_problem_until_it_answers() -> None:
    sampler = Dead()
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            fleet.environment("environment-0")
            fleet.inference("inference-0", sampler=sampler)
            await fleet.request("e0")
            await fleet.until(lambda: "inference-0" in fleet.beats and bool(fleet.beats["inference-0"].problem))
            assert fleet.beats["inference-0"].problem == "engine failed: nothing answers at http://127.0.0.1:9"
            sampler.is_mended = True
            await fleet.request("e1")
            await fleet.until(lambda: not fleet.beats["inference-0"].problem)
            await fleet.all_results(2)
