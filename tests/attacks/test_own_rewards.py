"""A policy whose text an agent executes cannot grade itself: what posts a reward is nowhere where its programs look."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.agent.sessions import NO_REWARD_KEY, REWARD_PREFIX, KeyRefused
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.gateway.agent_keys import SessionKeys
from tests.support.backends import asyncio_alone

AGENT = Path(__file__).with_name("rewarding_agent.py")
ACTION = Action(episode_id="e", attempt=1, turn=0, text="go on")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="agents are confined on Linux"),
    pytest.mark.timeout(120),
    pytest.mark.integration,
]

anyio_backend = asyncio_alone


class HonestGrader:
    async def verify(self, code: str, *, final_answer: str | None, conversation: Any, tools: Any) -> Verdict:
        return Verdict(reward=0.0)


def read_told(start: Any) -> Any:
    text = start.messages[0].content
    return json.loads(text) if text.startswith("{") else {"wrong": text}


@asynccontextmanager
async def playing(spec: str, isolation: str, verifier: str = "") -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """An episode, and what the policy's program found in it."""
    if isolation == "required":
        try:
            require_isolation()
        except IsolationUnavailable as unavailable:
            pytest.skip(str(unavailable))
    settings = Configuration(environment=EnvironmentSettings(agent_isolation=isolation))  # type: ignore[arg-type]
    factory = build_environment_factory(spec, verifier=HonestGrader(), configuration=settings)
    async with factory.run():
        environment: Any = factory()
        try:
            config = {"answer": "the-expected-answer", "sandboxed": isolation == "required"}
            await environment.open(Task(key="t", prompt="p", config=config, verifier=verifier))
            yield environment, read_told(await environment.reset())
        finally:
            await environment.close()


@pytest.mark.parametrize("isolation", ["required", "off"])
async def test_the_shell_of_a_function_that_grades_itself_finds_no_reward_key(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(AGENT.parent)
    async with playing("agent:rewarding_agent:play", isolation) as (environment, found):
        assert "statuses" in found, found
        assert found["statuses"] and set(found["statuses"]) == {401}, "the key of its calls gives no reward"
        assert not found["answer"], "nor is the task to be read"
        assert (await environment.step(ACTION)).terminated
        assert (await environment.verify()).reward == 0.0


@pytest.mark.parametrize("isolation", ["required", "off"])
async def test_the_shell_of_a_command_finds_no_reward_key_and_the_verifier_decides(isolation: str) -> None:
    async with playing(f"agent:{sys.executable} {AGENT}", isolation, "graded") as (environment, found):
        assert "statuses" in found, found
        assert found["statuses"] and set(found["statuses"]) == {401}
        assert (await environment.step(ACTION)).terminated
        assert (await environment.verify()).reward == 0.0


async def test_a_command_without_a_verifier_is_not_played() -> None:
    with pytest.raises(EnvironmentFailed, match=r"no verifier.*environment\.agent_reward_url"):
        async with playing(f"agent:{sys.executable} {AGENT}", "off"):
            pass


def test_a_key_of_a_gateways_session_is_not_its_reward_key() -> None:
    keys = SessionKeys(bytes(32), "r")
    key, reward_key = keys.make("e1", 10**18), keys.make("e1", 10**18, REWARD_PREFIX)
    assert keys.read(key, 0) == keys.read(reward_key, 0, REWARD_PREFIX) == "e1"
    for forged in (key, REWARD_PREFIX + key.removeprefix("fbs-"), reward_key[:-1] + "g", ""):
        with pytest.raises(KeyRefused, match=NO_REWARD_KEY):
            keys.read(forged, 0, REWARD_PREFIX)
