"""A run whose environments are on a Fleet-compatible platform that is killed in the middle, and comes back."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pytest

from fleetbus.config.settings import Configuration, FleetSettings, InferenceSettings, LimitSettings
from fleetbus_schemas import EpisodeFinished, Task
from fleetbus_workers.environment.adapters.fleet import host as fleet_host
from fleetbus_workers.inference.scripted import ScriptedTemplate
from tests.support.fleet_platform.episodes import fleet_environments
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import serve_application
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment

TASK = Task(key="t", env="shop", prompt="Play.", verifier="def verify(env): return 0.5")
PATIENT = LimitSettings(open=50, reset=50, tool_call=50, step=50, action=50, verify=50, close=50, episode=100, grace=10)


class OneTool(ScriptedTemplate):
    """A policy that calls the same tool all the time."""

    tool = "hang"

    def decode_text(self, ids: Sequence[int]) -> str:
        return f'<tool_call>{{"name": "{self.tool}", "arguments": {{"name": "ink"}}}}</tool_call>'


def patient() -> Configuration:
    inference = InferenceSettings(slots=16, max_model_len=1 << 20)
    return msgspec.structs.replace(
        build_configuration(limits=PATIENT, inference=inference), fleet=FleetSettings(ready_seconds=40)
    )


async def results(fleet: SmallDeployment, names: Sequence[str]) -> list[EpisodeFinished]:
    return [await fleet.result(name) for name in names]


@pytest.mark.integration
@pytest.mark.timeout(180)
async def test_the_platform_dies_in_mid_run_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.setattr(fleet_host, "MAX_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(fleet_host, "CREATE_TRIES", 100)
    platform, template = FleetPlatform(), OneTool()
    lost, waiting = ["a0", "a1", "a2", "a3"], ["b0", "b1", "b2"]
    with anyio.fail_after(150):
        async with small_deployment(patient()) as fleet, serve_application(platform.app) as server:
            factory = fleet_environments(server, patient())
            async with factory.run():
                fleet.environment("environment", make=factory)
                fleet.inference("inference", template=template)
                for name in lost:
                    await fleet.request(name, task=TASK, max_turns=2)
                await platform.until(lambda: [made.shop.calls for made in platform.instances.values()] == [["hang"]] * 4)
                await server.kill()
                died = await results(fleet, lost)
                template.tool = "price"
                for name in waiting:
                    await fleet.request(name, task=TASK, max_turns=2)
                await fleet.until(lambda: fleet.beats["environment"].in_flight == len(waiting))
                await server.start()
                survived = await results(fleet, waiting)
                await fleet.drain_members()
            assert {(each.outcome, each.error_class, each.reward) for each in died} == {("env_failed", "ServerGone", None)}
            assert {(each.outcome, each.reward, each.tool_calls) for each in survived} == {("truncated", 0.5, 2)}
            assert len(platform.instances) == len(lost) + len(waiting)
            assert not platform.running
            assert all(len(stored) == 1 for stored in fleet.results.values())


@pytest.mark.slow  # a lease of 10 s has to run out
@pytest.mark.timeout(180)
async def test_a_worker_that_crashes_leaves_no_instance_and_its_episode_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    platform, template = FleetPlatform(), OneTool()
    with anyio.fail_after(150):
        async with small_deployment(patient()) as fleet, serve_application(platform.app) as server:
            own, other = (fleet_environments(server, patient()) for _ in range(2))
            async with other.run():
                fleet.inference("inference", template=template)
                async with own.run():
                    crashing = fleet.environment("crashing", make=own)
                    await fleet.request("e", task=TASK, max_turns=2)
                    await platform.until(lambda: any(made.shop.calls for made in platform.instances.values()))
                    crashing.kill()
                    await crashing.ended.wait()
                assert not platform.running
                template.tool = "price"
                fleet.environment("other", make=other)
                result = await fleet.result("e")
                assert (result.outcome, result.reward, result.attempts) == ("truncated", 0.5, 2)
                await fleet.drain_members()
            assert not platform.running
