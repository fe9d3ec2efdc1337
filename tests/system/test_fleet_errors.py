"""Errors of a Fleet-compatible platform, from a refused key to a verifier that fails."""

from __future__ import annotations

import anyio
import pytest

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.fleet import host as fleet_host
from fleetbus_workers.environment.adapters.fleet.api import FleetRefused, FleetUnavailable
from fleetbus_workers.environment.adapters.mcp.connection import ServerGone
from fleetbus_workers.environment.base import EnvironmentFailed
from tests.support.fleet_platform.episodes import TASK, begun, environments, platform, prepare, settings
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.tool_calls import call, read_step_text

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


async def test_a_refused_key_fails_at_once_and_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FleetPlatform()
    fleet.faults.refuse_key = True
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetRefused, match="HTTP 401") as caught:
            await environment.open(TASK)
        assert [path for method, path in fleet.requests if method == "POST"] == ["/v1/env/instances"]
    output = capsys.readouterr()
    assert "[redacted]" in str(caught.value)
    assert KEY not in str(caught.value) + output.out + output.err + repr(environment.__dict__)


async def test_passing_troubles_of_making_an_instance_are_outlived() -> None:
    fleet = FleetPlatform()
    fleet.faults.create_errors = [(503, "temporarily overloaded"), (400, {"message": "health check failed"})]
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert len(fleet.instances) == 1


async def test_an_instance_whose_making_was_not_answered_is_found_and_not_made_twice() -> None:
    fleet = FleetPlatform()
    fleet.faults.lose_create_answers = 1
    async with platform(fleet) as (_, server):
        async with environments(server) as environment:
            await begun(environment)
        assert [made.status for made in fleet.instances.values()] == ["stopped"]


async def test_an_account_at_its_limit_makes_episodes_wait_for_each_other() -> None:
    fleet = FleetPlatform()
    fleet.faults.instance_limit = 1
    async with platform(fleet) as (_, server), environments(server) as first, environments(server) as second:
        await begun(first)
        async with anyio.create_task_group() as group:
            group.start_soon(second.open, TASK)
            await fleet.until(lambda: fleet.requests.count(("POST", "/v1/env/instances")) > fleet_host.CREATE_TRIES + 1)
            assert len(fleet.instances) == 1
            await first.close()
        assert [made.status for made in fleet.instances.values()] == ["stopped", "running"]


async def test_an_episode_that_waited_too_long_for_the_accounts_limit_asks_no_more() -> None:
    fleet = FleetPlatform()
    fleet.faults.instance_limit = 1
    async with platform(fleet) as (_, server), environments(server) as first, environments(server) as second:
        await begun(first)
        with anyio.move_on_after(0.2):
            await second.open(TASK)
        await second.close()
        await first.close()
        await fleet.until(lambda: not fleet.running)
        await begun(second)
        assert [made.status for made in fleet.instances.values()] == ["stopped", "running"]


async def test_what_the_platform_refuses_fails_the_episode_with_its_words() -> None:
    fleet = FleetPlatform()
    fleet.faults.create_errors = [(400, {"error_type": "env_not_found", "message": "no environment named shop"})]
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetRefused, match="no environment named shop"):
            await environment.open(TASK)


async def test_a_slow_instance_is_waited_for() -> None:
    fleet = FleetPlatform()
    fleet.faults.pending_polls = 3
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert fleet.instances["inst1"].polls == 3


async def test_an_instance_that_ends_in_error_fails_the_episode_and_is_deleted() -> None:
    fleet = FleetPlatform()
    fleet.faults.pending_polls, fleet.faults.end_in = 1, "error"
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetUnavailable, match="in state error"):
            await environment.open(TASK)
        assert not fleet.running


async def test_a_reset_that_fails_is_only_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FleetPlatform()
    fleet.faults.reset_fails = True
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert read_step_text(await environment.step(call("price", name="pen"))) == "Tool result:\n3"
    assert "fleet instance reset failed; continuing" in capsys.readouterr().out


async def test_tools_that_cannot_be_listed_fail_the_episode_and_the_instance_is_deleted() -> None:
    fleet = FleetPlatform()
    fleet.faults.no_mcp = True
    async with platform(fleet) as (_, server), environments(server, settings(ready_seconds=0.6)) as environment:
        with pytest.raises(EnvironmentFailed, match=r"tools of Fleet instance inst1 cannot be listed.*HTTP 404"):
            await environment.open(TASK)
        await environment.close()
        assert not fleet.running


async def test_a_call_that_fails_is_an_observation() -> None:
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment)
        step = await environment.step(call("price", name="gold"))
        assert read_step_text(step) == 'Error: {"error": "no such item"}'
        assert (step.tool_calls, step.tool_errors) == (1, 1)
        assert read_step_text(await environment.step(call("price"))).startswith("Error: ")


async def test_a_call_that_times_out_is_not_sent_again() -> None:
    async with platform() as (fleet, server), environments(server, settings(call_seconds=2.0)) as environment:
        await begun(environment)
        assert "may still have had its effect" in read_step_text(await environment.step(call("hang")))
        assert fleet.instances["inst1"].shop.calls == ["hang"]


async def test_an_instance_that_dies_during_a_call_fails_the_episode() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        shop = fleet.instances["inst1"].shop
        async with anyio.create_task_group() as group:

            async def kill() -> None:
                await shop.hanging.wait()
                await server.kill()

            group.start_soon(kill)
            with pytest.raises(ServerGone):
                await environment.step(call("hang"))
        await server.start()


async def test_an_instance_that_the_platform_ended_fails_the_episode() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        fleet.instances["inst1"].status = "stopped"
        with pytest.raises(ServerGone):
            await environment.step(call("price", name="ink"))


@pytest.mark.parametrize("fault", ["verifier_errors", "judge_errors"])
async def test_a_verifier_that_fails_is_tried_again_and_is_never_a_zero(fault: str) -> None:
    for failures, reward in ((2, 0.0), (9, None)):
        fleet = FleetPlatform()
        setattr(fleet.faults, fault, failures)
        async with platform(fleet) as (_, server), environments(server) as environment:
            await begun(environment)
            assert (await environment.verify()).reward == reward


async def test_a_verifier_that_is_no_python_or_raises_gives_no_verdict() -> None:
    for code, words in (("def verify(env:", "not Python"), ("x = 1", "no function"), ("def verify(env): 1/0", "ZeroDivision")):
        async with platform() as (_, server), environments(server) as environment:
            await begun(environment, Task(key="t", env="shop", prompt="p", verifier=code))
            verdict = await environment.verify()
            assert verdict.reward is None
            assert words in verdict.reason


async def test_a_verifiers_own_code_never_runs_in_the_worker() -> None:
    code = "import os\nraise SystemExit(os.getpid())\ndef verify(env): return 1"
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment, Task(key="t", env="shop", prompt="p", verifier=code))
        assert (await environment.verify()).reward is None
