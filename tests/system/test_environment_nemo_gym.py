"""A resources server of NeMo Gym: sessions, tools and verdicts as its source has them, and what is no verdict."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.adapters.nemo_gym import environment as nemo_gym
from fleetbus_workers.environment.adapters.nemo_gym.environment import NemoGymEnvironment, check_url
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone
from tests.support.nemo_gym_server import ROW, NemoGymDouble, nemo_gym_double
from tests.support.tool_calls import NoGrader, call, say

anyio_backend = asyncio_alone

TASK = Task(key="t", config={"row": ROW})
ADD = {count: ToolCall(name="increment_counter", arguments={"count": count}, id=f"c{count}") for count in (1, 2)}


@asynccontextmanager
async def playing(double: NemoGymDouble, task: Task = TASK, **options: Any) -> AsyncIterator[NemoGymEnvironment]:
    environment = NemoGymEnvironment(
        double.url, options.pop("seconds", 10.0), options.pop("verify", 10.0), options.pop("prompt", "template"), **options
    )
    try:
        await environment.open(task)
        await environment.reset()
        yield environment
    finally:
        await environment.close()


async def test_an_episode_seeds_calls_tools_and_is_verified() -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        start = await environment.reset()
        assert [message.role for message in start.messages] == ["system", "user"]
        assert [tool.name for tool in start.tools] == ["increment_counter", "get_counter_value"]
        step = await environment.step(say("<think>Both.</think>", ADD[1], ADD[2]))
        assert [message.content for message in step.messages] == ['{"success":true}'] * 2 and step.tool_calls == 2
        step = await environment.step(say("", ToolCall(name="get_counter_value", id="c3")))
        assert [message.content for message in step.messages] == ['{"count":6}'], "the cookie is of one session"
        assert (await environment.step(say("<think>So.</think>It is 6."))).terminated
        assert (await environment.verify()).reward == 1.0
        output = double.verified[0]["response"]["output"]
        assert [item["type"] for item in output] == ["function_call", "function_call_output"] * 3 + ["message"]
        assert output[-1]["content"][0]["text"] == "It is 6."
        assert double.verified[0]["expected_count"] == 6


async def test_tools_that_are_told_in_words_end_with_done() -> None:
    async with nemo_gym_double() as (double, _), playing(double, prompt="fleet") as environment:
        start = await environment.reset()
        assert start.prompted == 1 and "increment_counter" in str(start.messages[0].content) and not start.tools
        step = await environment.step(call("increment_counter", count=3))
        assert [message.role for message in step.messages] == ["user"] and not step.terminated
        assert not (await environment.step(say("I have added."))).terminated
        assert (await environment.step(say("It is 6. <done>"))).terminated
        assert (await environment.verify()).reward == 1.0


async def test_two_episodes_at_once_have_sessions_of_their_own() -> None:
    async with nemo_gym_double() as (double, _), playing(double) as one, playing(double) as other:
        await one.step(say("", ADD[1], ADD[2]))
        await other.step(say("", ADD[1]))
        assert [(await each.verify()).reward for each in (one, other)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("verdict", "reward", "reason"),
    [
        ({"reward": 0.5, "mask_sample": False}, 0.5, ""),
        ({"reward": True}, 1.0, ""),
        (
            {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "503"},
            None,
            "judge_failed: 503",
        ),
        ({"reward": 1.0, "mask_sample": True}, None, "does not say why"),
        ({"reward": None, "failure_kind": "verifier_error"}, None, "verifier_error"),
        ({"reward": float("nan")}, None, "no number"),
        ({"reward": "1.0"}, None, "no number"),
        ({}, None, "no number"),
        ({"reward": 0.25, "failure_kind": "agent_timeout", "failure_reason": "slow"}, 0.25, "agent_timeout: slow"),
    ],
)
async def test_what_is_masked_is_no_reward_but_a_reason(verdict: dict[str, Any], reward: float | None, reason: str) -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        double.verdict = verdict
        found = await environment.verify()
        assert found.reward == reward and reason in found.reason


@pytest.mark.integration
async def test_a_verdict_may_take_longer_than_a_tool_and_has_a_limit_too() -> None:
    async with nemo_gym_double() as (double, _), playing(double, seconds=0.5, verify=3.0) as environment:
        double.faults["verify"] = ["slow", "hang"]
        assert (await environment.verify()).reward == 0.0
        with anyio.fail_after(20), pytest.raises(EnvironmentFailed, match="verify: no answer within 3 s"):
            await environment.verify()


async def test_a_prompt_of_the_task_comes_before_the_messages_of_the_row() -> None:
    async with nemo_gym_double() as (double, _):
        async with playing(double, msgspec.structs.replace(TASK, prompt="Be brief.")) as environment:
            start = await environment.reset()
    assert [(message.role, message.content) for message in start.messages][:2] == [
        ("system", "Be brief."),
        ("system", "Count."),
    ]


async def test_rewards_by_objective_are_components() -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        double.verdict = {"reward": 1.0, "reward_components": {"calls": 1, "style": 0.5, "broken": None}}
        assert (await environment.verify()).components == {"calls": 1.0, "style": 0.5}


@pytest.mark.parametrize("fault", [500, "not json", "[1]", "[" * 100_000])
async def test_a_verify_that_fails_is_no_verdict(fault: int | str) -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        double.faults["verify"] = [fault]
        verdict = await environment.verify()
        assert verdict.reward is None and verdict.reason


@pytest.mark.parametrize("fault", [502, 503, 504, 429, 401, "redirect", "hang"])
async def test_a_server_that_is_gone_or_sends_elsewhere_fails_the_episode(fault: int | str) -> None:
    async with nemo_gym_double() as (double, _), playing(double, seconds=1.0) as environment:
        double.faults["increment_counter"] = [fault]
        with pytest.raises(EnvironmentFailed, match="increment_counter"):
            await environment.step(say("", ADD[1]))
        assert double.asked.count("increment_counter") == 1, "a tool is never called again"


async def test_errors_of_tools_are_for_the_policy_to_read_and_other_addresses_are_no_tools() -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        wrong = [
            ToolCall(name=name, id=name) for name in ("increment_counter", "verify", "../verify", "close_session", "a b?c")
        ]
        step = await environment.step(say("", *wrong))
        assert step.tool_errors == 5 and "Field required" in str(step.messages[0].content)
        assert double.asked == ["seed_session", "increment_counter"]
        double.faults["increment_counter"] = [500]
        assert (await environment.step(say("", ADD[1]))).tool_errors == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\ud800"])
async def test_arguments_that_are_no_json_are_the_policy_s_error_and_never_leave(value: object) -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        wrong = ToolCall(name="increment_counter", arguments={"count": value}, id="c1")
        step = await environment.step(say("", wrong))
        assert step.tool_errors == 1 and "no JSON" in str(step.messages[0].content)
        assert "increment_counter" not in double.asked and (await environment.verify()).reward == 0.0


async def test_a_server_cannot_fill_the_memory_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_gym, "MAX_OUTPUT_BYTES", 1000)
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        double.faults["increment_counter"] = ["x" * 900] * 2
        await environment.step(say("", ADD[1]))
        with pytest.raises(EnvironmentFailed, match="more than 1000 bytes"):
            await environment.step(say("", ADD[1]))
        double.faults["verify"] = ["text/plain " + "[" + "[]," * 400_000 + "[]]"]
        assert "JSON with up to" in (await environment.verify()).reason


@pytest.mark.integration
async def test_a_seed_is_repeated_and_given_up_after_three() -> None:
    async with nemo_gym_double() as (double, _):
        double.faults["seed_session"] = [503, 502]
        async with playing(double) as environment:
            await environment.step(say("", ADD[1], ADD[2]))
            assert (await environment.verify()).reward == 1.0
        double.faults["seed_session"] = [503] * 3
        with pytest.raises(EnvironmentFailed, match="HTTP 503"):
            async with playing(double):
                pass
        double.faults["seed_session"] = [422]
        with pytest.raises(EnvironmentFailed, match="seed_session: HTTP 422"):
            async with playing(double):
                pass
        assert double.asked.count("seed_session") == 7


@pytest.mark.integration
async def test_a_cancelled_call_is_over_at_once_and_closed() -> None:
    async with nemo_gym_double() as (double, _), playing(double) as environment:
        double.faults["increment_counter"] = ["hang"]
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(environment.step, say("", ADD[1]))
                await double.hanging.wait()
                tasks.cancel_scope.cancel()
            await environment.close()
        with pytest.raises(EnvironmentFailed, match="not open"):
            await environment.step(say("", ADD[1]))


async def test_a_server_that_is_killed_fails_the_episode_in_words() -> None:
    async with nemo_gym_double() as (double, server), playing(double) as environment:
        await server.kill()
        for call in (environment.step(say("", ADD[1])), environment.verify()):
            with pytest.raises(EnvironmentFailed):
                await call


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no row"),
        ({"row": {}}, "no responses_create_params"),
        ({"row": {"responses_create_params": {"input": []}}}, "neither a text nor"),
        (
            {"row": {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}},
            "no message of text",
        ),
        ({"row": {"responses_create_params": {"input": [{"type": "function_call", "name": "f"}]}}}, "no message of text"),
        ({"row": {"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}}, "no function"),
        (
            {"row": {"responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "verify"}]}}},
            "no function",
        ),
    ],
)
async def test_a_row_that_cannot_be_played_says_why(config: dict[str, Any], words: str) -> None:
    environment = NemoGymEnvironment("http://127.0.0.1:9", 1.0, 1.0)
    with pytest.raises(EnvironmentFailed, match=words):
        await environment.open(msgspec.structs.replace(TASK, config=config))
    await environment.close()


@pytest.mark.parametrize(
    "url",
    ["ftp://u:secret@h", "http://u:secret@h", "http://", "http://h:0", "http://h:x", "http://h?a=b", "h:80", "http://[::1"],
)
def test_a_bad_address_is_one_line_and_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as refused:
        build_environment_factory(f"nemo-gym:{url}", verifier=NoGrader())
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
    assert run_program(["check", f"nemo-gym:{url}"]) == 2
    shown = capsys.readouterr()
    assert "secret" not in shown.err + shown.out and len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("tasks", [None, [{"key": "a", "prompt": "p"}]])
def test_a_run_without_rows_is_refused_before_anything_starts(
    tasks: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps(tasks))
    named = ["--tasks", "t.json"] if tasks else []
    assert run_program(["up", "--environment", "nemo-gym:http://127.0.0.1:9", *named]) == 2
    said = capsys.readouterr().err
    assert "has no row in its config; give rows of the server's dataset with --tasks" in said and said.count("\n") == 1
    assert run_program(["tasks", "import", "nemo-gym:http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "lists no tasks" in said and said.count("\n") == 1 and os.listdir(tmp_path) == ["t.json"]


def test_an_address_may_end_in_a_slash() -> None:
    assert check_url("https://host:1/gym/") == "https://host:1/gym"
