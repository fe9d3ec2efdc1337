"""A seat's other policy that fails, is away or has no room: its episode has no reward, whatever the trained policy did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fleetbus.config.settings import InferenceSettings, LimitSettings, RunSettings
from fleetbus_schemas import EpisodeFinished
from fleetbus_workers.inference.base import Generation, GenerationRequest, RequestRefused, Sampler
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import LIMITS, RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_seats_taken_over import OTHERS, Table

pytestmark = pytest.mark.integration

anyio_backend = virtual_time


class Refusing(ScriptedSampler):
    async def generate(self, request: GenerationRequest) -> Generation:
        raise RequestRefused("status 400, no such model")


class Speechless(ScriptedSampler):
    """Has no room for an answer."""

    async def generate(self, request: GenerationRequest) -> Generation:
        return Generation(ids=[], logprobs=[], finish_reason="length", versions=())


async def play(other: Callable[[], Sampler] | None, **limits: float) -> EpisodeFinished:
    """An episode whose request grades time-outs, with the workers of the other policy, or without any."""
    settings = LimitSettings(**{name: limits.get(name, getattr(LIMITS, name)) for name in LIMITS.__struct_fields__})
    configuration = build_configuration(limits=settings, run=RunSettings(name=RUN, seats=OTHERS))
    async with small_deployment(replace(configuration, inference=InferenceSettings(slots=4))) as fleet:
        members = [fleet.environment("environment", make=Table), fleet.inference("inference")]
        if other is not None:
            members.append(fleet.inference("inference-other", sampler=other(), policy="simulator"))
        await fleet.heard(*members)
        await fleet.request("e", timeout_reward=-1.0)
        return await fleet.result("e")


async def test_a_policy_that_nobody_serves_is_no_fault_of_the_one_that_is_trained() -> None:
    result = await play(None)
    assert (result.outcome, result.reward, result.turns) == ("timeout", None, 1)
    assert result.error.endswith("(of the policy simulator, seat b)")


async def test_an_episode_that_ends_while_the_other_policy_is_asked_has_no_reward() -> None:
    result = await play(None, action=600.0, episode=10.0)
    assert (result.outcome, result.reward) == ("timeout", None)


@pytest.mark.parametrize(("sampler", "error_class"), [(Refusing, "engine_refused"), (Speechless, "seat_without_room")])
async def test_a_server_that_answers_no_turn_loses_the_episode_and_nothing_else(
    sampler: Callable[[], Sampler], error_class: str
) -> None:
    result = await play(sampler)
    assert (result.outcome, result.error_class, result.reward) == ("lost", error_class, None)
    assert all(seat.reward is None for seat in result.seats)
