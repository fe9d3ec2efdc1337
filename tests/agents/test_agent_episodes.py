"""Agents in a deployment: what they ask becomes an episode whose segments are as the agent began them."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children
from tests.support.small_deployment import build_configuration, small_deployment

FOREST = Path(__file__).with_name("forest_agent.py")
LIMITS = LimitSettings(open=30, reset=30, step=30, action=30, verify=30, close=30, episode=50, grace=10, drain=10)

pytestmark = pytest.mark.timeout(120)


async def test_sub_agents_and_edited_histories_are_segments_of_one_episode() -> None:
    settings = Configuration(environment=EnvironmentSettings(agent_reward_url=True))
    spec = f"agent:{sys.executable} {FOREST}"
    factory = build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]
    with anyio.fail_after(100):
        async with factory.run(), small_deployment(configuration=build_configuration(limits=LIMITS)) as fleet:
            await fleet.publish_policy()
            fleet.inference("i1")
            fleet.environment("e1", make=factory)
            await fleet.request("e")
            result = await fleet.result("e")
    assert (result.outcome, result.reward, result.turns) == ("completed", 1.0, 10), result.error
    print(result.info)
    reasons = [segment.origin.reason if segment.origin else None for segment in result.segments]
    assert reasons == [None, "sub_agent", "sub_agent", "history_edited", "sub_agent", "sub_agent"]
    assert [segment.turns for segment in result.segments] == [3, 1, 1, 1, 2, 2], "two sub-agents side by side have one each"
    assert result.info["calls_extending"] == 4
    assert result.info["segments_begun"] == {"sub_agent": 4, "history_edited": 1}
    assert not children()


async def test_an_agent_of_two_seats_is_one_episode_in_which_each_has_its_reward() -> None:
    settings = Configuration(environment=EnvironmentSettings(agent_reward_url=True))
    agent = Path(__file__).with_name("scripted_agent.py")
    factory = build_environment_factory(f"agent:{sys.executable} {agent}", verifier=None, configuration=settings)  # type: ignore[arg-type]
    limits = [{"model": f"policy:seat:{name}"} for name in ("left", "right", "left")]
    task = Task(
        key="t", prompt="Say", config={"calls": 3, "limits": limits, "reward": 0.5, "seats": {"left": 1.0, "right": None}}
    )
    with anyio.fail_after(100):
        async with factory.run(), small_deployment(configuration=build_configuration(limits=LIMITS)) as fleet:
            fleet.inference("i1")
            fleet.environment("e1", make=factory)
            await fleet.request("e", task=task)
            result = await fleet.result("e")
            report = await audit_run(fleet.bus, fleet.subjects)
    assert (result.outcome, result.reward) == ("completed", 0.5), result.error
    assert [(seat.name, seat.turns, seat.reward) for seat in result.seats] == [("left", (0, 2), 1.0), ("right", (1,), None)]
    assert [(each.turn, each.reason) for each in result.untrained] == [(1, "seat")]
    assert not report.findings, report.findings
