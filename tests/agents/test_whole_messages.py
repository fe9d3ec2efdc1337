"""The words of an agent are shown to the policy whole, and an attempt that takes over shows the same."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EnvironmentSettings, InferenceSettings, LimitSettings
from fleetbus_schemas import Task
from tests.agents.gateway_support import SUBJECTS, find_port, grader, read_text, running, say, take, wait_for
from tests.agents.scripted_factory import build_scripted_agents
from tests.support.small_deployment import build_configuration, small_deployment

LIMITS = LimitSettings(open=30, reset=30, step=30, action=30, verify=30, close=30, episode=50, grace=10, drain=10)
SMALL = 1024
LONG = "x" * 3 * SMALL


@pytest.mark.parametrize("weights", [None, {"verifier": 1.0}], ids=["plain", "weighed"])
async def test_a_later_message_of_an_agent_is_not_cut(weights: dict[str, float] | None) -> None:
    make = build_scripted_agents(weights)
    configuration = build_configuration(
        limits=LIMITS,
        environment=EnvironmentSettings(slots=8, observation_bytes=SMALL),
        inference=InferenceSettings(slots=16, max_model_len=1 << 16),
    )
    with anyio.fail_after(60):
        async with make.run(), small_deployment(configuration) as fleet:
            await fleet.publish_policy()
            fleet.inference("i1")
            fleet.environment("e1", make=make)
            await fleet.request("e", task=Task(key="t", prompt=LONG, config={"calls": 2, "reward": 1}))
            result = await fleet.result("e")
            assert result.outcome == "completed", result.error
            shown = [observed.messages[-1].content for observed in await fleet.observations()]
    assert shown == [f"{LONG} 0", f"{LONG} 1"]


@pytest.mark.integration
@pytest.mark.timeout(120)
async def test_a_gateway_that_is_killed_after_a_long_message_is_replaced(tmp_path: Path) -> None:
    port = find_port()
    small = ("--environment-observation-bytes", f"{SMALL}")
    async with running(tmp_path) as run, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with run.start_gateway(port, *small) as gateway:
            await wait_for(client)
            await run.request("e1")
            session = await take(client)
            first = read_text(await say(client, session, "one"))
            second = read_text(await say(client, session, "one", first, LONG))
            gateway.kill()
        with run.start_gateway(port, *small):
            await wait_for(client)
            read_text(await say(client, session, "one", first, LONG, second, "three"))
            ended = await client.post("/sessions/e1/reward", json={"reward": 1.0}, headers=grader(session))
            assert ended.json()["outcome"] == "completed"
        result = await run.result("e1")
        assert (result.turns, result.attempts, result.segments) == (3, 2, ())
        report = await audit_run(run.bus, SUBJECTS)
        assert report.balanced, report.findings
