"""The OpenEnv gateway over a real WebSocket: the protocol, and what its own servers get wrong."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from fleetbus_workers.environment.adapters.openenv.client import open_session
from tests.support.openenv_gateway import gateway


async def test_an_episode_is_played_over_one_socket() -> None:
    async with gateway() as here, here.socket() as socket:
        told = (await socket.ask("reset", seed=7, prompt="Add to"))["data"]
        assert told["observation"]["text"] == "Add to 7"
        assert (told["reward"], told["done"]) == (None, False)
        for turn, done in enumerate((False, False, True), 1):
            told = (await socket.ask("step", text=f"t{turn}"))["data"]
            assert (told["observation"]["text"], told["reward"], told["done"]) == (f"t{turn}", 0.5, done)
        state = (await socket.send('{"type": "state"}'))["data"]
        assert (state["step_count"], state["count"]) == (3, 3)


async def test_the_project_s_own_client_of_the_protocol_plays_through_the_gateway() -> None:
    async with gateway() as here:
        session = await open_session(f"{here.url.replace('http', 'ws', 1)}/ws")
        await session.reset({"seed": 1})
        observed = await session.step({"message": "hi"})
        assert observed.reward == 0.5
        assert (await session.state())["step_count"] == 1
        await session.close()
        await here.empty()


async def test_a_step_before_reset_and_one_after_the_end_are_refused() -> None:
    async with gateway() as here, here.socket() as socket:
        refused = await socket.ask("step", text="early")
        assert (refused["type"], refused["data"]["code"]) == ("error", "EXECUTION_ERROR")
        await socket.ask("reset")
        for _ in range(3):
            await socket.ask("step", text="x")
        assert (await socket.ask("step", text="late"))["data"]["code"] == "EXECUTION_ERROR"
        assert len(here.world.steps) == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("notjson", "INVALID_JSON"),
        (b"\xff\x00binary", "INVALID_JSON"),
        ("[1, 2]", "VALIDATION_ERROR"),
        ('{"type": "bogus"}', "UNKNOWN_TYPE"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"wrong": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"type": "call_tool", "tool_name": 3}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "x"}, "request_id": "r"}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1e30}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 123456789012345678901234567890}}', "VALIDATION_ERROR"),
        ('{"type": "\\ud800"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"text": "\\ud800"}}', "VALIDATION_ERROR"),
        (
            '{"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 99999999999999999999}}}',
            "VALIDATION_ERROR",
        ),
        (json.dumps({"type": "step", "data": {"text": "x" * (2 << 20)}}), "VALIDATION_ERROR"),
    ],
)
async def test_a_bad_frame_never_ends_the_session(frame: str | bytes, code: str) -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        await socket.ask("step", text="one")
        error = await socket.send(frame)
        assert (error["type"], error["data"]["code"]) == ("error", code), error
        await socket.ask("step", text="two")
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 2


async def test_an_environment_that_raises_says_so_and_a_reset_begins_anew() -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        error = (await socket.ask("step", text="boom"))["data"]
        assert (error["code"], error["error_class"]) == ("EXECUTION_ERROR", "RuntimeError")
        assert "boom!" in error["message"]
        assert (await socket.ask("reset"))["type"] == "observation"


async def test_what_is_no_number_is_told_and_not_null() -> None:
    async with gateway() as here, here.socket() as socket:
        told = (await socket.ask("reset"))["data"]
        assert told["metadata"] == {"score": "NaN"}
        error = (await socket.ask("step", text="nan"))["data"]
        assert (error["code"], error["error_class"]) == ("EXECUTION_ERROR", "reward_not_finite")


@pytest.mark.parametrize("field", ["image", "confidence", "tool_name"])
async def test_what_an_action_has_beside_its_text_is_refused_by_name_and_the_session_goes_on(field: str) -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        refused = (await socket.ask("step", text="x", **{field: "y"}))["data"]
        assert refused["code"] == "VALIDATION_ERROR" and field in refused["message"]
        assert "and not a click" in (await socket.ask("step", text="x", type="click"))["data"]["message"]
        assert "not both" in (await socket.ask("step", text="x", message="y"))["data"]["message"]
        assert (await socket.ask("step", text="x", metadata={"request_id": "r"}))["data"]["reward"] == 0.5
        assert here.world.steps == ["x"]


async def test_over_capacity_a_connection_waits_for_a_slot() -> None:
    async with gateway(slots=1, capacity_timeout=30) as here, here.socket() as second:
        async with here.socket() as first, anyio.create_task_group() as group:
            await first.ask("reset")
            answers: list[dict[str, Any]] = []

            async def wait() -> None:
                answers.append(await second.ask("reset"))

            group.start_soon(wait)
            await first.ask("step", text="x")
            assert not answers
            await first.connection.close()
        assert answers[0]["type"] == "observation"


async def test_without_a_slot_in_time_the_protocol_s_own_error_comes() -> None:
    async with gateway(slots=1, capacity_timeout=0.5) as here, here.socket() as first, here.socket() as second:
        await first.ask("reset")
        assert (await second.ask("reset"))["data"]["code"] == "CAPACITY_REACHED"


async def test_a_client_that_is_gone_frees_its_slot_and_its_environment_is_closed() -> None:
    async with gateway(slots=1) as here:
        async with here.socket() as socket:
            await socket.ask("reset")
            socket.connection.transport.abort()
        await here.empty()
        assert here.world.opened == here.world.closed == 1


async def test_tool_calls_are_steps_however_they_come() -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        listed = await socket.ask("mcp", jsonrpc="2.0", method="tools/list", id=1)
        assert listed["data"]["result"]["tools"][0]["name"] == "add"
        called = await socket.ask("step", type="call_tool", tool_name="add", arguments={"a": 2, "b": 3})
        told = called["data"]["observation"]
        assert (told["text"], told["tool_name"], told["error"]) == ("5", "add", None)
        assert told["result"] == {"content": [{"type": "text", "text": "5"}], "data": "5", "is_error": False}
        arguments = {"name": "add", "arguments": {"a": 1, "b": 1}}
        called = await socket.ask("mcp", jsonrpc="2.0", method="tools/call", id=2, params=arguments)
        assert (called["data"]["result"]["data"], called["data"]["result"]["reward"]) == ("2", 0.5)
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 2


async def test_sessions_over_http_are_made_used_and_closed() -> None:
    async with gateway() as here:
        session = (await here.rpc("openenv/session/create", seed=1))["result"]["session_id"]
        assert (await here.rpc("tools/list", session_id=session))["result"]["tools"][0]["name"] == "add"
        called = await here.rpc("tools/call", session_id=session, name="add", arguments={"a": 1, "b": 2})
        assert called["result"]["data"] == "3"
        assert (await here.rpc("initialize", session_id=session))["error"]["code"] == -32601
        assert (await here.rpc("tools/list", session_id="nope"))["error"]["code"] == -32602
        assert (await here.rpc("openenv/session/close", session_id=session))["result"]["closed"] is True
        await here.empty()


async def test_a_session_made_over_http_goes_on_over_a_socket() -> None:
    async with gateway() as here:
        session = (await here.rpc("openenv/session/create"))["result"]["session_id"]
        async with here.socket(f"?session_id={session}") as socket:
            assert (await socket.ask("step", text="x"))["data"]["reward"] == 0.5
        async with here.socket("?session_id=nope") as socket:
            assert json.loads(await socket.connection.recv())["data"]["code"] == "SESSION_ERROR"
