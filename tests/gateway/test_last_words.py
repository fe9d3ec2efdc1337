"""The last words of a remote gym - observation, info, success - come to results and through gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import AdapterContext
from fleetbus_workers.environment.adapters.remote_gym.environment import build
from tests.support.openenv_gateway import gateway
from tests.support.paying import gym_gateway, paying_configuration
from tests.support.remote_gym_server import RemoteGymDouble, remote_gym_double
from tests.support.rule_policy import RuleSampler, RuleTemplate
from tests.support.small_deployment import small_deployment
from tests.support.tool_calls import NoGrader


@asynccontextmanager
async def climbing() -> AsyncIterator[Any]:
    """Makes environments on a remote gym that is climbed with two steps."""
    double = RemoteGymDouble(goal=2)
    async with remote_gym_double(double):
        factory = build(AdapterContext(spec=f"remote-gym:{double.url}", grader=NoGrader()))
        async with factory.run():
            yield factory


async def test_in_the_result_of_an_episode() -> None:
    async with small_deployment(paying_configuration()) as fleet, climbing() as make:
        fleet.environment("e1", make=make)
        fleet.inference("i1", sampler=RuleSampler(), template=RuleTemplate())
        await fleet.request(task=Task(key="t", prompt="WORLD=climb"))
        result = await fleet.result()
    assert (result.outcome, result.reward, result.success) == ("completed", 1.0, True)
    assert (result.info, result.last_observation) == ({"success": True}, "at 2")


async def test_through_the_remote_gym_gateway() -> None:
    async with small_deployment(paying_configuration()) as fleet, climbing() as make, gym_gateway(fleet) as wire:
        fleet.environment("e1", make=make)
        session = (await wire.connect())["session_id"]
        first = await wire.call(session, "step", action_str="up")
        last = await wire.call(session, "step", action_str="up")
        assert (first["info"]["success"], first["done"]) == (False, False)
        assert (last["obs"], last["info"]["success"], last["reward"], last["done"]) == ("at 2", True, 1.0, True)
        await wire.call(session, "close")


async def test_through_the_openenv_gateway() -> None:
    made: list[Any] = []
    async with gateway(make=lambda: made[0]()) as here, climbing() as make, here.socket() as socket:
        made.append(make)
        await socket.ask("reset")
        await socket.ask("step", text="up")
        told = (await socket.ask("step", text="up"))["data"]
        assert (told["observation"]["text"], told["metadata"]["success"], told["done"]) == ("at 2", True, True)
