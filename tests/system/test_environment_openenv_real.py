"""Against the real OpenEnv server: the same episodes as on the server of the ordinary tests, and its known defects.

Opt-in (`just test-openenv`): `openenv` needs an older `mcp` and lives in an environment of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import EpisodeSettings, InferenceSettings, LimitSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.openenv.client import ConnectionLost, ExecutionFailed, SessionFailed
from fleetbus_workers.environment.adapters.openenv.environment import OpenEnvEnvironment
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer
from fleetbus_workers.environment.base import Start, Step, Verdict
from tests.support.openenv_process import openenv_python, openenv_server
from tests.support.rule_policy import RuleSampler, RuleTemplate
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.tool_calls import call, say

pytestmark = [
    pytest.mark.openenv,
    pytest.mark.timeout(300),
    pytest.mark.skipif(openenv_python() is None, reason="no Python with openenv: `just test-openenv` makes one"),
]


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with openenv_server("echo", 4) as url:
        yield url


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    with openenv_server("tools", 4) as url:
        yield url


@asynccontextmanager
async def playing(server: OpenEnvServer | str, **task: Any) -> AsyncIterator[tuple[OpenEnvEnvironment, Start]]:
    server = OpenEnvServer(server) if isinstance(server, str) else server
    environment = OpenEnvEnvironment(server, grader=None, prompt="compact")  # type: ignore[arg-type]
    with anyio.fail_after(120):
        try:
            await environment.open(Task(key="t", prompt="Play.", **task))
            yield environment, await environment.reset()
        finally:
            await environment.close()


def seen(step: Step) -> str:
    return str(step.messages[0].content)


async def test_an_echo_world_is_played_to_its_end(echo: str) -> None:
    async with playing(echo, seed=7) as (environment, start):
        assert start.messages[-1].content == "Play.\n\nready"
        step = await environment.step(say("hello"))
        assert (seen(step), step.reward) == ("hello", 0.5)
        assert (await environment.state())["seed"] == 7
        assert (await environment.step(say("stop"))).terminated
        assert await environment.verify() == Verdict(reward=1.0)


async def test_tools_are_played_through_step_with_their_rewards(tools: str) -> None:
    async with playing(tools) as (environment, start):
        assert '"name": "add"' in str(start.messages[0].content)
        assert "tool exploded" in seen(await environment.step(call("fail")))
        assert "Error" in seen(await environment.step(call("add", a="x")))
        step = await environment.step(call("add", a=2, b=3))
        assert (step.reward, step.terminated, step.tool_errors) == (1.0, True, 0)
        assert (await environment.state())["step_count"] == 3
        assert await environment.verify() == Verdict(reward=1.0)
        assert await environment.call_tool("add", {"a": 1, "b": 1}) == 2
        assert (await environment.state())["step_count"] == 3, "grading is no step"


async def test_defect_1_a_full_server_accepts_and_then_refuses_here_episodes_wait(echo: str) -> None:
    server = OpenEnvServer(echo)
    rewards: list[float | None] = []

    async def play() -> None:
        async with playing(server) as (environment, _):
            await environment.step(say("stop"))
            rewards.append((await environment.verify()).reward)

    async with server.run(), anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(play)
    assert rewards == [0.5] * 12


async def test_defect_2_a_dropped_session_would_go_on_in_a_fresh_environment_here_it_is_over(echo: str) -> None:
    async with playing(echo) as (environment, _):
        await environment.step(say("hello"))
        environment._require_session()._socket.transport.abort()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await environment.step(say("hello"))


async def test_defect_3_a_step_cut_short_would_shift_all_replies_here_it_ends_the_session(echo: str) -> None:
    async with playing(echo) as (environment, _):
        with anyio.move_on_after(0.5) as scope:
            await environment.step(say("sleep"))
        assert scope.cancelled_caught
        with pytest.raises(ConnectionLost, match="was cancelled"):
            await environment.step(say("would get the sleeper's reply"))


async def test_defect_4_a_step_cut_short_keeps_its_place_here_the_next_episode_waits() -> None:
    with openenv_server("echo", 1) as url:
        server = OpenEnvServer(url)
        async with playing(server) as (environment, _):
            with anyio.move_on_after(0.5):
                await environment.step(say("sleep"))
        async with playing(server) as (environment, _):
            assert seen(await environment.step(say("hello"))) == "hello"


async def test_defect_5_calls_at_the_same_time_would_swap_replies_here_each_gets_its_own(echo: str) -> None:
    async with playing(echo) as (environment, _):
        session = environment._require_session()
        replies: dict[str, Any] = {}

        async def step(message: str) -> None:
            replies[message] = (await session.step({"message": message})).observation["echoed"]

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(step, str(number))
        assert all(sent == echoed for sent, echoed in replies.items())


async def test_defect_6_an_idle_session_would_be_closed_under_its_socket_here_it_is_kept_awake() -> None:
    with openenv_server("echo", 2, idle_seconds=3) as url:
        awake, asleep = OpenEnvServer(url, keep_alive=1.0), OpenEnvServer(url)
        async with awake.run(), playing(awake) as (kept, _), playing(asleep) as (lost, _):
            await anyio.sleep(12)
            assert seen(await kept.step(say("hello"))) == "hello"
            assert seen(await lost.step(say("hello"))) == "hello (closed)", "the defect is still there"


async def test_defect_7_a_validator_that_raises_kills_the_session_here_that_is_an_error_with_its_name(echo: str) -> None:
    async with playing(echo) as (environment, _):
        with pytest.raises((SessionFailed, ConnectionLost)):
            await environment.step(say("forbidden"))
        with pytest.raises(ConnectionLost):
            await environment.step(say("hello"))
    async with playing(echo) as (environment, _):
        with pytest.raises(ExecutionFailed, match="boom!"):
            await environment.step(say("boom"))


async def test_a_server_that_is_killed_fails_its_episodes_and_the_run_goes_on_when_it_is_back() -> None:
    begun, released = anyio.Event(), anyio.Event()
    waiting = 0

    def hold(world: str, turn: int) -> anyio.Event | None:
        nonlocal waiting
        waiting += turn == 1
        if waiting == 4:
            begun.set()
        return released if turn == 1 else None

    task = Task(key="t", prompt="WORLD=words")
    settings = build_configuration(
        limits=LimitSettings(),
        inference=InferenceSettings(slots=16, max_model_len=8192),
        episode=EpisodeSettings(max_tokens=64, max_turns=5, max_episode_tokens=8192),
    )
    sampler = RuleSampler({"words": ("one", "two", "stop")}, hold=hold)
    with anyio.fail_after(250):
        async with small_deployment(settings) as fleet:
            with openenv_server("echo", 8) as url:
                server = OpenEnvServer(url)
                fleet.environment("environment-0", make=lambda: OpenEnvEnvironment(server, grader=None))  # type: ignore[arg-type]
                fleet.inference("inference-0", sampler=sampler, template=RuleTemplate())
                for number in range(4):
                    await fleet.request(f"before-{number}", task=task)
                await begun.wait()
            released.set()
            died = await fleet.all_results(4)
            with openenv_server("echo", 8, port=int(url.rpartition(":")[2])):
                for number in range(4):
                    await fleet.request(f"after-{number}", task=task)
                every = await fleet.all_results(8)
                await fleet.drain_members()
    assert {(result.outcome, result.reward, result.error_class) for result in died} == {("env_failed", None, "ConnectionLost")}
    survived = [result for result in every if result.episode_id.startswith("after")]
    assert {(result.outcome, result.reward) for result in survived} == {("completed", 1.5)}


async def test_a_reward_that_is_no_number_comes_as_null_and_gives_no_verdict(echo: str) -> None:
    async with playing(echo, config={"reward": "last"}) as (environment, _):
        await environment.step(say("nan"))
        assert (await environment.verify()).reward is None
