"""MCP servers over stdio, also such as others wrote: how they are played, and what is left when things go wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_command
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children, until
from tests.support.tool_calls import NoGrader, call, read_step_text

TASK = Task(key="t", prompt="Do it.", verifier="def verify(env): return 1", env_variables={"REGION": "EU"})


def command(*arguments: str) -> str:
    return "stdio:" + " ".join([sys.executable, *arguments])


@asynccontextmanager
async def playing_spec(spec: str) -> AsyncIterator[McpEnvironment]:
    factory = build_environment_factory(spec, verifier=NoGrader())
    async with factory.run():
        environment = factory()
        assert isinstance(environment, McpEnvironment)
        assert not environment.replayable
        with anyio.fail_after(50):
            await environment.open(TASK)
            try:
                await environment.reset()
                yield environment
            finally:
                await environment.close()
        assert not children(), "a closed episode leaves no process"


@pytest.mark.integration
async def test_the_time_server_of_others_is_played() -> None:
    async with playing_spec(command("-m", "mcp_server_time")) as environment:
        time = await environment.step(call("get_current_time", timezone="Europe/Berlin"))
        assert json.loads(read_step_text(time).removeprefix("Tool result:\n"))["timezone"] == "Europe/Berlin"
        failed = await environment.step(call("get_current_time", timezone="Mars"))
        assert read_step_text(failed).startswith("Error: ")
        assert (failed.tool_calls, failed.tool_errors) == (1, 1)
        converted = await environment.step(
            call("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
        )
        assert "+9.0h" in read_step_text(converted)


@pytest.mark.integration
async def test_the_git_server_of_others_is_played(tmp_path: Path) -> None:
    await anyio.run_process(["git", "init", "-q", str(tmp_path)])
    async with playing_spec(command("-m", "mcp_server_git", "--repository", str(tmp_path))) as environment:
        assert "No commits yet" in read_step_text(await environment.step(call("git_status", repo_path=str(tmp_path))))
        (tmp_path / "new.txt").write_text("x")
        assert "new.txt" in read_step_text(await environment.step(call("git_status", repo_path=str(tmp_path))))
        assert read_step_text(await environment.step(call("git_log", repo_path="/nowhere"))).startswith("Error: ")


SERVER = """
import json, os, sys

def answer(method, params):
    if method == "initialize":
        info = {"name": "bad", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("pid", "die", "hang")]}
    if method == "tools/call" and params["name"] == "die":
        os._exit(1)
    if method == "tools/call" and params["name"] == "pid":
        return {"content": [{"type": "text", "text": str(os.getpid())}]}

for line in sys.stdin:
    message = json.loads(line)
    method = message.get("method")
    if "id" not in message or message.get("params", {}).get("name") == "hang":
        continue
    result = answer(method, message.get("params"))
    outcome = {"result": result} if result else {"error": {"code": -32601, "message": "Method not found"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
"""
"""A server without the SDK, so that it starts at once: the old handshake, a tool that dies and one that never answers."""


@pytest.fixture
def bad_server(tmp_path: Path) -> str:
    (tmp_path / "bad.py").write_text(SERVER)
    return command(str(tmp_path / "bad.py"))


async def test_a_server_that_dies_in_a_call_fails_the_episode(bad_server: str) -> None:
    async with playing_spec(bad_server) as environment:
        with pytest.raises(EnvironmentFailed, match="died"):
            await environment.step(call("die"))
        with pytest.raises(EnvironmentFailed):
            await environment.step(call("pid"))


async def test_a_hung_call_is_cancelled_and_the_server_goes_on(bad_server: str) -> None:
    async with playing_spec(bad_server) as environment:
        with anyio.move_on_after(0.2) as scope:
            await environment.step(call("hang"))
        assert scope.cancelled_caught
        assert read_step_text(await environment.step(call("pid"))).startswith("Tool result:\n")


async def test_episodes_have_processes_of_their_own(bad_server: str) -> None:
    factory = build_environment_factory(bad_server, verifier=NoGrader())
    async with factory.run():
        first, second = factory(), factory()
        await first.open(TASK)
        await second.open(TASK)
        assert read_step_text(await first.step(call("pid"))) != read_step_text(await second.step(call("pid")))
        await first.close()
        await first.close()
        assert read_step_text(await second.step(call("pid"))).startswith("Tool result:\n")
        await second.close()
        assert not children()


async def test_opening_and_closing_may_happen_in_different_tasks(bad_server: str) -> None:
    factory = build_environment_factory(bad_server, verifier=NoGrader())
    async with factory.run():
        environment = factory()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.open, TASK)
        with anyio.fail_after(50):
            await environment.step(call("pid"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.close)
        assert not children()


async def test_a_cancelled_open_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("import sys\nsys.stdin.read()")
    factory = build_environment_factory(command(str(tmp_path / "mute.py")), verifier=NoGrader())
    async with factory.run():
        environment = factory()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.open, TASK)
            await until(lambda: bool(children()))
            tasks.cancel_scope.cancel()
        with anyio.fail_after(50):
            await environment.close()
        assert not children()


async def test_a_host_that_is_cancelled_while_a_server_starts_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("import sys\nsys.stdin.read()")
    factory = build_environment_factory(command(str(tmp_path / "mute.py")), verifier=NoGrader())
    with anyio.fail_after(50), anyio.CancelScope() as scope:
        async with factory.run(), anyio.create_task_group() as tasks:
            tasks.start_soon(factory().open, TASK)
            await until(lambda: bool(children()))
            scope.cancel()
    assert not children()


async def test_open_says_why_a_server_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no license')")
    factory = build_environment_factory(command(str(tmp_path / "broken.py")), verifier=NoGrader())
    async with factory.run():
        environment = factory()
        with anyio.fail_after(50), pytest.raises(EnvironmentFailed, match="no license"):
            await environment.open(TASK)
        await environment.close()
        assert not children()


async def test_a_cancelled_close_still_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(SERVER)
    host = ConnectionHost()
    async with host.run():
        connection = ClientConnection(partial(open_command, [sys.executable, str(tmp_path / "bad.py")]), host)
        await connection.open()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await connection.close()
        await until(lambda: not children())


async def test_the_end_of_the_host_closes_what_is_still_open(bad_server: str) -> None:
    factory = build_environment_factory(bad_server, verifier=NoGrader())
    with anyio.fail_after(50):
        async with factory.run():
            environment = factory()
            await environment.open(TASK)
            assert children()
        assert not children()
        await environment.close()


async def test_opening_outside_of_running_is_refused(bad_server: str) -> None:
    environment = build_environment_factory(bad_server, verifier=NoGrader())()
    with pytest.raises(RuntimeError, match=r"run\(\)"):
        await environment.open(TASK)
    await environment.close()
