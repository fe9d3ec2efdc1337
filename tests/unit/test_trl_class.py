"""A class that was written for TRL's ``environment_factory`` is an environment by its name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.adapters.common.call_threads import CallThreads
from fleetbus_workers.environment.adapters.mcp.trl_class import TrlConnection
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.tool_calls import NoGrader

pytest.importorskip("transformers")
pytest.importorskip("torch")  # transformers imports it when it makes a schema: on a busy machine longer than a test may take

CLASS = '''
class Counter:
    def __init__(self):
        self.reward = 0.0

    def reset(self, start: int = 0, **row):
        assert row["prompt"] == [{"role": "user", "content": "Count to three."}]
        self.count, self.reward = start, 0.0
        return f" You are at {start}."

    def add(self, amount: int) -> str:
        """
        Count further.

        Args:
            amount: How far.
        """
        if amount < 0:
            raise ValueError("only upwards")
        self.count += amount
        self.reward = float(self.count == 3)
        return f"You are at {self.count}."

    async def look(self) -> str:
        """Look where you are."""
        return f"At {self.count}."

    def get_reward(self) -> float:
        return self.reward

    def _helper(self):
        return None


class Slow(Counter):
    def look(self) -> str:
        """Wait."""
        import time
        time.sleep(0.5)
        return "late"


class Undocumented(Counter):
    def sell(self, amount: int) -> str:
        return ""


class Failing(Counter):
    def reset(self, **row):
        raise OSError("the simulator is away")


class Ungraded(Counter):
    def get_reward(self):
        raise OSError("the judge is away")
'''

TOGETHER = """
import threading

everyone = threading.Barrier(60)


class Together:
    def reset(self, **row):
        return ""

    def meet(self) -> str:
        \"\"\"Wait until all are here.\"\"\"
        everyone.wait(20.0)
        return "met"

    def get_reward(self) -> float:
        return 1.0
"""

TASK = Task(key="t", prompt="Count to three.", config={"start": 1})


def make(folder: Path, name: str, **limits: float) -> Any:
    file = folder / "counting.py"
    file.write_text(CLASS)
    configuration = Configuration()
    limited = msgspec.structs.replace(configuration.limits, **limits)
    configuration = msgspec.structs.replace(configuration, limits=limited)
    return build_environment_factory(f"{file}:{name}", verifier=NoGrader(), configuration=configuration)()


def act(text: str = "", *calls: ToolCall) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text, tool_calls=calls)


async def test_its_methods_are_tools_and_its_reward_the_verdict(tmp_path: Path) -> None:
    environment = make(tmp_path, "Counter")
    await environment.open(TASK)
    start = await environment.reset()
    assert [message.content for message in start.messages] == ["Count to three. You are at 1."]
    assert [tool.name for tool in start.tools] == ["add", "look"]
    assert start.tools[0].description == "Count further."
    assert start.tools[0].parameters["properties"] == {"amount": {"type": "integer", "description": "How far."}}
    step = await environment.step(act("", ToolCall(name="add", arguments={"amount": 2}), ToolCall(name="look")))
    assert [message.content for message in step.messages] == ["You are at 3.", "At 3."]
    assert (await environment.step(act("Done."))).terminated
    assert (await environment.verify()).reward == 1.0
    await environment.close()


async def test_what_a_method_raises_is_told_to_the_policy(tmp_path: Path) -> None:
    environment = make(tmp_path, "Counter")
    await environment.open(TASK)
    await environment.reset()
    for arguments, said in (({"amount": -1}, "only upwards"), ({"size": 1}, "unexpected keyword argument 'size'")):
        step = await environment.step(act("", ToolCall(name="add", arguments=arguments)))
        assert said in str(step.messages[0].content)
        assert step.tool_errors == 1
    assert "_helper" in str((await environment.step(act("", ToolCall(name="_helper")))).messages[0].content)
    assert (await environment.verify()).reward == 0.0


async def test_a_reset_that_raises_is_a_failure_and_a_reward_that_raises_no_verdict(tmp_path: Path) -> None:
    failing, ungraded = make(tmp_path, "Failing"), make(tmp_path, "Ungraded")
    await failing.open(TASK)
    with pytest.raises(OSError, match="the simulator is away"):
        await failing.reset()
    await ungraded.open(TASK)
    await ungraded.reset()
    verdict = await ungraded.verify()
    assert verdict.reward is None
    assert "the judge is away" in verdict.reason


async def test_a_call_that_blocks_holds_nobody_up_and_is_given_up(tmp_path: Path) -> None:
    environment = make(tmp_path, "Slow", tool_call=0.05)
    await environment.open(TASK)
    await environment.reset()
    started = time.monotonic()
    step = await environment.step(act("", ToolCall(name="look")))
    assert time.monotonic() - started < 0.4
    assert "abandoned" in str(step.messages[0].content)
    assert (await environment.verify()).reward == 0.0, "it waits for the call"


async def test_calls_after_one_that_was_given_up_take_no_thread_until_it_has_ended() -> None:
    """A policy may try again in each of thousands of turns."""
    released = threading.Event()

    class Stuck:
        def look(self) -> bool:
            return released.wait(30)

    connection = TrlConnection(Stuck, (), TASK, call_seconds=0.02, threads=CallThreads())
    await connection.open()
    assert (await connection.call_tool("look", {})).failed
    before = threading.active_count()
    for _ in range(20):
        assert (await connection.call_tool("look", {})).failed
    assert threading.active_count() == before
    released.set()
    with anyio.fail_after(5):
        while (await connection.call_tool("look", {})).failed:
            pass


def test_a_method_that_trl_would_make_no_schema_of_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its method sell is no tool: Cannot generate JSON schema for sell"):
        make(tmp_path, "Undocumented")


async def test_more_calls_than_a_worker_has_threads_are_under_way_at_once(tmp_path: Path) -> None:
    file = tmp_path / "together.py"
    file.write_text(TOGETHER)
    factory = build_environment_factory(f"{file}:Together", verifier=NoGrader())
    environments = [factory() for _ in range(60)]
    said: list[str] = []

    async def meet(environment: Any) -> None:
        await environment.open(TASK)
        await environment.reset()
        said.append(str((await environment.step(act("", ToolCall(name="meet")))).messages[0].content))

    async with anyio.create_task_group() as tasks:
        for environment in environments:
            tasks.start_soon(meet, environment)
    assert said == ["met"] * 60
