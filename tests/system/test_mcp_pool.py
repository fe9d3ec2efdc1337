"""MCP servers that are reset instead of started: who gets a used process, and who must not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus.config.settings import Configuration, LimitSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.base import Environment, EnvironmentFailed, Step
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children, until
from tests.support.tool_calls import NoGrader, call

SERVER = """
import json, os, sys
state = {"count": 0, "resets": 0}

def call(name, arguments):
    if name == "new_game":
        state["count"] = arguments.get("seed", 0)
        state["resets"] += 1
        worn = state["resets"] > 1 and os.path.exists("only-once")
        return "refused" if worn or os.path.exists("no-reset") else "ready"
    if name == "die":
        os._exit(1)
    state["count"] += 1
    return json.dumps([os.getpid(), state["count"]])

def answer(method, params):
    if method == "initialize":
        info = {"name": "game", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        schemas = {"move": {"type": "object"}, "die": {"type": "object"}, "new_game": {"type": "object"}}
        schemas["new_game"]["properties"] = {"seed": {"type": "integer"}}
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]}
    if method == "tools/call":
        text = call(params["name"], params.get("arguments") or {})
        return {"content": [{"type": "text", "text": text}], "isError": text == "refused"}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message or (message.get("params") or {}).get("name") == "move" and os.path.exists("hang"):
        continue
    result = answer(message.get("method"), message.get("params"))
    outcome = {"result": result} if result else {"error": {"code": -32601, "message": "Method not found"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
"""
"""A game without the SDK, so that it starts at once; it hangs, or refuses to be reset (again), while a file says so."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "game.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def game(folder: Path, *, tool: str = "new_game", call_seconds: float = 60.0) -> EnvironmentFactory:
    spec = f"stdio+reset={tool}:{sys.executable} {folder / 'game.py'}"
    return build_environment_factory(
        spec, verifier=NoGrader(), configuration=Configuration(limits=LimitSettings(tool_call=call_seconds))
    )


async def opened(factory: EnvironmentFactory, seed: int | None = None) -> Environment:
    environment = factory()
    with anyio.fail_after(50):
        await environment.open(Task(key="t", prompt="p", seed=seed))
    return environment


def seen(step: Step) -> str:
    (message,) = step.messages
    assert isinstance(message.content, str)
    return message.content.removeprefix("Tool result:\n")


async def moved(environment: Environment) -> tuple[int, int]:
    """The process that answered, and its count."""
    with anyio.fail_after(50):
        process, count = json.loads(seen(await environment.step(call("move"))))
    return process, count


async def test_the_next_episode_gets_the_same_process_reset(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first = await opened(factory, seed=10)
        process, count = await moved(first)
        assert count == 11
        assert [name for name in ("move", "die", "new_game") if name in str((await first.reset()).messages[0].content)] == [
            "move",
            "die",
        ]
        await first.close()
        second = await opened(factory, seed=20)
        assert await moved(second) == (process, 21)
        await second.close()
    assert not children()


async def test_episodes_at_the_same_time_have_processes_of_their_own(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first, second = await opened(factory), await opened(factory)
        one, two = (await moved(first))[0], (await moved(second))[0]
        assert one != two
        await first.close()
        await second.close()
        third = await opened(factory)
        assert (await moved(third))[0] == two, "the most recently used one"
        await third.close()
    assert not children()


async def test_the_reset_tool_is_nobody_elses(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        environment = await opened(factory)
        assert "unknown tool" in seen(await environment.step(call("new_game")))
        await environment.close()


async def test_a_process_that_died_is_not_used_again(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first = await opened(factory)
        process = (await moved(first))[0]
        with pytest.raises(EnvironmentFailed, match="died"):
            await first.step(call("die"))
        await first.close()
        second = await opened(factory)
        assert (await moved(second))[0] != process
        await second.close()


async def test_a_process_that_died_while_it_waited_is_replaced(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first = await opened(factory)
        process = (await moved(first))[0]
        await first.close()
        psutil.Process(process).kill()
        second = await opened(factory)
        assert (await moved(second))[0] != process
        await second.close()


async def test_a_process_that_cannot_be_reset_again_is_replaced(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first = await opened(factory)
        process = (await moved(first))[0]
        await first.close()
        (folder / "only-once").touch()
        second = await opened(factory)
        assert (await moved(second))[0] != process
        await second.close()
    assert not children()


async def test_a_process_with_a_call_that_timed_out_is_not_used_again(folder: Path) -> None:
    factory = game(folder, call_seconds=0.3)
    async with factory.run():
        first = await opened(factory)
        (folder / "hang").touch()
        with anyio.fail_after(50):
            assert "abandoned" in seen(await first.step(call("move")))
        (folder / "hang").unlink()
        await first.close()
        await until(lambda: not children())


async def test_a_process_with_a_call_that_was_cancelled_is_not_used_again(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        first = await opened(factory)
        (folder / "hang").touch()
        with anyio.move_on_after(0.2):
            await first.step(call("move"))
        await first.close()
        await until(lambda: not children())


async def test_a_server_that_cannot_be_reset_fails_the_episode(folder: Path) -> None:
    factory = game(folder)
    async with factory.run():
        (folder / "no-reset").touch()
        environment = factory()
        with anyio.fail_after(50), pytest.raises(EnvironmentFailed, match="could not be reset: refused"):
            await environment.open(Task(key="t", prompt="p"))
        await environment.close()
        assert not children()


async def test_a_reset_tool_that_is_not_there_is_named(folder: Path) -> None:
    factory = game(folder, tool="begin")
    async with factory.run():
        environment = factory()
        with anyio.fail_after(50), pytest.raises(EnvironmentFailed, match="no tool 'begin'"):
            await environment.open(Task(key="t", prompt="p"))
        await environment.close()
        assert not children()
