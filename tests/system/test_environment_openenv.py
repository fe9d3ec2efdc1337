"""OpenEnv environments: the protocol, what the policy sees, and every way in which a session can go wrong."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.core.text.prompts import NO_CALL
from fleetbus.errors import UserError
from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.environment.adapters.common.action_text import extract_action
from fleetbus_workers.environment.adapters.openenv.client import (
    ActionRefused,
    AtCapacity,
    ConnectionLost,
    ExecutionFailed,
    SessionFailed,
    UnknownType,
    open_session,
)
from fleetbus_workers.environment.adapters.openenv.environment import OpenEnvEnvironment, find_text_field
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer, parse_addresses
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Verdict
from fleetbus_workers.environment.isolation.verifier import VerifierTools
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.openenv_server import MOVE_SCHEMA, OpenEnvDouble, openenv_double
from tests.support.tool_calls import call, read_step_text, say


class RecordingGrader:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        total = await tools.call_tool("add", {"a": 1, "b": 1})
        with pytest.raises(LookupError):
            await tools.call_tool("nope", {})
        with pytest.raises(LookupError):
            await tools.query("select 1", ())
        self.given = {"answer": final_answer, "turns": len(conversation), "total": total}
        return Verdict(reward=0.25)


def socket_url(double: OpenEnvDouble) -> str:
    return parse_addresses(double.url)[0]


@asynccontextmanager
async def playing(
    double: OpenEnvDouble, *, task: Task | None = None, grader: Any = None, prompt: Any = "compact"
) -> AsyncIterator[tuple[OpenEnvEnvironment, Start]]:
    environment = OpenEnvEnvironment(OpenEnvServer(double.url), grader=grader or RecordingGrader(), prompt=prompt)
    with anyio.fail_after(50):
        try:
            await environment.open(task or Task(key="t", prompt="Play."))
            yield environment, await environment.reset()
        finally:
            await environment.close()


async def test_a_text_world_is_played_by_text_and_graded_by_the_sum_of_its_rewards() -> None:
    task = Task(key="t", prompt="Play.", seed=7, config={"reset": {"level": 2}})
    async with openenv_double(turns=2) as double, playing(double, task=task) as (environment, start):
        assert [message.content for message in start.messages] == ["Play.\n\nready"]
        assert await environment.state() == {"episode_id": "x", "step_count": 0, "level": 2, "seed": 7}
        step = await environment.step(say("<think>hm</think> <action>hello</action>"))
        assert (read_step_text(step), step.reward, step.terminated) == ("hello", 0.5, False)
        assert (await environment.step(say("again"))).terminated
        assert await environment.verify() == Verdict(reward=1.0)


async def test_tools_are_called_through_step_so_that_rewards_and_counts_are_right() -> None:
    async with openenv_double(world="tools") as double, playing(double) as (environment, start):
        assert '"name": "add"' in str(start.messages[0].content)
        unknown = await environment.step(call("multiply", a=1))
        assert "unknown tool" in read_step_text(unknown)
        assert double.steps == 0, "a tool that does not exist is answered here"
        failed = await environment.step(call("add", a=1))
        assert (read_step_text(failed), failed.tool_errors, failed.terminated) == ("Error: add cannot be called so", 1, False)
        assert read_step_text(await environment.step(say("I think."))) == NO_CALL
        step = await environment.step(call("add", a=2, b=3))
        assert (step.reward, step.terminated, step.tool_calls, step.tool_errors) == (1.0, True, 1, 0)
        assert (await environment.state())["step_count"] == double.steps == 2
        assert await environment.verify() == Verdict(reward=1.0)


async def test_a_task_s_verifier_may_call_tools_without_counting_as_a_step() -> None:
    grader = RecordingGrader()
    task = Task(key="t", prompt="Play.", verifier="def verify(env): ...")
    async with openenv_double(world="tools") as double, playing(double, task=task, grader=grader) as (environment, _):
        assert (await environment.step(say("It is 5. <done>"))).terminated
        assert await environment.verify() == Verdict(reward=0.25)
        assert grader.given == {"answer": "It is 5.", "turns": 3, "total": 2}
        assert double.steps == 0


async def test_tools_that_cannot_be_listed_are_a_failure_and_not_an_environment_without_tools() -> None:
    async with openenv_double(world="tools") as double:
        double.tools_fail = True
        with pytest.raises(EnvironmentFailed, match="the tools are gone"):
            async with playing(double):
                pass
        assert double.steps == 0


async def test_an_action_with_several_fields_is_one_tool() -> None:
    async with openenv_double() as double:
        double.schema = MOVE_SCHEMA
        async with playing(double, prompt="template") as (environment, start):
            (tool,) = start.tools
            assert set(tool.parameters["properties"]) == {"row", "column"}
            made = tuple(ToolCall(name="act", arguments={"message": text}, id=text) for text in ("b2", "c3"))
            step = await environment.step(say("Two.", *made))
            assert double.frames[-1] == {"type": "step", "data": {"message": "b2"}}
            assert [(message.role, message.tool_call_id) for message in step.messages] == [("tool", "b2"), ("tool", "c3")]
            assert (await environment.step(say("I am done."))).terminated


async def test_a_refused_action_is_shown_to_the_policy_and_the_session_goes_on() -> None:
    task = Task(key="t", prompt="Play.", config={"action_field": "wrong"})
    async with openenv_double() as double, playing(double, task=task) as (environment, _):
        step = await environment.step(say("x"))
        assert "message: Field required" in read_step_text(step)
        assert (step.tool_errors, step.terminated) == (1, False)


async def test_no_reward_at_all_is_no_verdict_and_not_zero() -> None:
    async with openenv_double(turns=1) as double:
        async with playing(double) as (environment, _):
            assert (await environment.step(say("nothing"))).terminated
            assert (await environment.verify()).reward is None
        task = Task(key="t", prompt="Play.", config={"reward": "last"})
        double.turns = 2
        async with playing(double, task=task) as (environment, _):
            assert not (await environment.step(say("something"))).unrewarded
            assert "no number" in (await environment.step(say("nothing"))).unrewarded
            assert (await environment.verify()).reward is None


@pytest.mark.parametrize(("message", "error"), [("boom", ExecutionFailed), ("bad validator", SessionFailed), ("nothing", None)])
async def test_an_environment_that_raises_and_a_session_that_dies_are_errors_of_their_own(
    message: str, error: type[Exception] | None
) -> None:
    async with openenv_double() as double, playing(double) as (environment, _):
        if error is None:
            await environment.step(say(message))
            return
        with pytest.raises(error) as caught:
            await environment.step(say(message))
        assert isinstance(caught.value, EnvironmentFailed)
        if error is SessionFailed:
            with pytest.raises(ConnectionLost, match="SESSION_ERROR"):
                await environment.step(say("again"))


async def test_each_error_code_has_its_own_type() -> None:
    async with openenv_double(sessions=1) as double:
        session = await open_session(socket_url(double))
        with pytest.raises(AtCapacity, match="1/1 sessions"):
            await open_session(socket_url(double))
        with pytest.raises(ActionRefused, match="message: Field required"):
            await session.step({"wrong": 1})
        with pytest.raises(ExecutionFailed, match="boom!"):
            await session.step({"message": "boom"})
        with pytest.raises(UnknownType):
            await session._call("bogus", "bogus")
        assert (await session.step({"message": "alive"})).reward == 0.5
        await session.close()


async def test_a_full_server_makes_episodes_wait_and_fails_none() -> None:
    served: list[int] = []

    async def play(server: OpenEnvServer, number: int) -> None:
        environment = OpenEnvEnvironment(server, grader=RecordingGrader())
        await environment.open(Task(key="t", prompt="Play."))
        await environment.reset()
        assert (await environment.step(say("stop"))).terminated
        await environment.close()
        served.append(number)

    async with openenv_double(sessions=2) as double:
        server = OpenEnvServer(double.url)
        with anyio.fail_after(50):
            async with server.run(), anyio.create_task_group() as group:
                for number in range(12):
                    group.start_soon(play, server, number)
        assert sorted(served) == list(range(12))
        assert double.most_active <= 2
        assert double.refused > 0


async def test_waiting_for_a_session_ends_when_its_time_is_up() -> None:
    async with openenv_double(sessions=0) as double:
        environment = OpenEnvEnvironment(OpenEnvServer(double.url), grader=RecordingGrader())
        with anyio.move_on_after(0.5) as scope:
            await environment.open(Task(key="t"))
        assert scope.cancelled_caught
        await environment.close()


async def test_a_dropped_socket_is_an_outcome_and_never_a_fresh_environment() -> None:
    async with openenv_double() as double, playing(double) as (environment, _):
        await environment.step(say("one"))
        await double.kill()
        await double.start()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await environment.step(say("two"))
        assert (double.opened, double.steps) == (1, 1)


async def test_a_call_that_was_cut_short_is_the_last_one_on_its_socket() -> None:
    async with openenv_double() as double, playing(double) as (environment, _):
        with anyio.move_on_after(30) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(environment.step, say("hang"))
                await double.hanging.wait()
                group.cancel_scope.cancel()
        assert not scope.cancelled_caught
        with pytest.raises(ConnectionLost, match="was cancelled"):
            await environment.step(say("would get the reply to the other"))


async def test_calls_at_the_same_time_get_their_own_replies() -> None:
    async with openenv_double(turns=100) as double:
        session = await open_session(socket_url(double))
        replies: dict[str, Any] = {}

        async def step(message: str) -> None:
            replies[message] = (await session.step({"message": message})).observation["echoed"]

        with anyio.fail_after(50):
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(step, str(number))
        assert replies == {str(number): str(number) for number in range(20)}
        await session.close()


async def test_an_idle_session_is_pinged_so_that_the_server_keeps_it() -> None:
    async with openenv_double() as double:
        server = OpenEnvServer(double.url, keep_alive=0.1)
        with anyio.fail_after(50):
            async with server.run():
                session = await server.open_session()
                while not any(frame.get("data", {}).get("method") == "ping" for frame in double.frames):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                assert (await session.step({"message": "x"})).observation["echoed"] == "x"
                await server.close_session(session)


async def test_nobody_there_is_said_with_the_address() -> None:
    environment = OpenEnvEnvironment(OpenEnvServer("http://127.0.0.1:1"), grader=RecordingGrader())
    with pytest.raises(ConnectionLost, match=r"no connection to the OpenEnv server ws://127\.0\.0\.1:1/ws"):
        await environment.open(Task(key="t"))
    with pytest.raises(EnvironmentFailed, match="never opened"):
        await environment.state()
    await environment.close()


async def test_the_session_is_given_back_at_the_end() -> None:
    async with openenv_double() as double:
        async with playing(double):
            assert double.active == 1
        with anyio.fail_after(50):
            while double.active:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert double.frames[-1] == {"type": "close"}


def test_addresses_are_understood_in_every_form() -> None:
    both = ("ws://h:1/ws", "http://h:1")
    assert (
        parse_addresses("http://h:1")
        == parse_addresses("ws://h:1/ws")
        == parse_addresses("h:1")
        == parse_addresses("http://h:1/")
        == both
    )
    assert parse_addresses("https://h/env/") == ("wss://h/env/ws", "https://h/env")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:x", "http://user:secret@h"])
def test_a_bad_address_is_one_line_without_secrets(url: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(f"openenv:{url}", verifier=RecordingGrader())
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("fleetbus_workers.environment.adapters.openenv", "websockets"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(UserError, match=r"needs websockets.*: pip install 'fleetbus\[openenv\]'"):
        build_environment_factory("openenv:http://h", verifier=RecordingGrader())


def test_the_text_field_is_the_only_required_text() -> None:
    assert find_text_field({"properties": {"metadata": {}, "message": {"type": "string"}}}) == "message"
    assert (
        find_text_field({"properties": {"code": {"type": "string"}, "x": {"type": "integer"}}, "required": ["code"]}) == "code"
    )
    assert find_text_field(MOVE_SCHEMA) == ""
    assert find_text_field({"properties": {"way": {"type": "string", "enum": ["up"]}}}) == ""


def test_the_spoken_action_is_what_stands_between_the_last_marks() -> None:
    assert extract_action(" up \n") == "up"
    assert extract_action("<think><action>no</action></think><action>a</action> <answer> b </answer>") == "b"
    assert extract_action("so</think>left") == "left"
