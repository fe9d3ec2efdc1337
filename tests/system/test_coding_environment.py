"""Coding episodes: how code is recognised, what the policy reads, and how the work is graded in the same isolation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.base import Environment, EnvironmentFailed
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, backends, find_isolation
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children, until

VERIFIER = """
async def verify(env, final_answer, conversation):
    state = await env.call_tool("python", {"code": "print(x)"})
    fresh = await env.call_tool("python_fresh", {"code": "print('x' in globals())"})
    assert fresh["stdout"] == "False\\n" and fresh["exit_code"] == 0, fresh
    return 1.0 if state["stdout"] == final_answer + "\\n" else 0.25
"""


@pytest.fixture
async def make() -> AsyncIterator[EnvironmentFactory]:
    try:
        await find_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    verifier = Verifier(VerifierLimits(seconds=40))
    factory = build_environment_factory("coding", verifier=verifier)
    async with verifier.run(), factory.run():
        yield factory
    await until(lambda: not children())


async def opened(make: EnvironmentFactory, task: Task) -> Environment:
    environment = make()
    with anyio.fail_after(50):
        await environment.open(task)
    return environment


async def step(environment: Environment, text: str, *calls: ToolCall) -> str:
    with anyio.fail_after(50):
        done = await environment.step(Action(episode_id="e", attempt=1, turn=0, text=text, tool_calls=calls))
    return "".join(str(message.content) for message in done.messages)


async def test_an_episode_is_played_and_graded(make: EnvironmentFactory) -> None:
    task = Task(key="t", prompt="Compute 6 * 7.", verifier=VERIFIER, config={"setup": "y = 7"})
    environment = await opened(make, task)
    start = await environment.reset()
    assert [message.role for message in start.messages] == ["system", "user"]
    assert '"name": "python"' in str(start.messages[0].content)
    assert await step(
        environment, 'Let me see.\n<tool_call>{"name": "python", "arguments": {"code": "x = 6 * y"}}</tool_call>'
    ) == ("Tool result:\n(no output)")
    assert await step(environment, "Now\n```python\nprint(x)\n```\nand") == "Tool result:\n42"
    failed = await step(environment, "", ToolCall(name="python", arguments={"code": "print(1); 1 / 0"}))
    assert failed.startswith('Tool result:\n1\n[stderr]\nTraceback (most recent call last):\n  File "<code 4>", line 1')
    assert failed.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    done = await environment.step(Action(episode_id="e", attempt=1, turn=0, text="42 <done>"))
    assert done.terminated and not done.messages
    assert (await environment.state())["answer"] == "42"
    verdict = await environment.verify()
    assert verdict.reward == 1.0, verdict.reason
    await environment.close()


async def test_the_policy_is_told_once_that_its_variables_are_lost(make: EnvironmentFactory) -> None:
    environment = await opened(make, Task(key="t", prompt="p"))
    await environment.reset()
    assert "variables are lost" in await step(environment, "```python\nimport os; os._exit(3)\n```")
    assert await step(environment, "```python\nprint('x' in globals())\n```") == "Tool result:\nFalse"

    session = environment._session  # type: ignore[attr-defined]
    session._interpreter.process.kill()  # as the watch over memory does, between two codes
    with anyio.fail_after(30):
        await session._interpreter.process.wait()
    lost = "[the interpreter was ended before this code: its variables are lost]"
    assert await step(environment, "```python\nprint(1)\n```") == f"Tool result:\n{lost}\n1"
    assert await step(environment, "```python\nprint(2)\n```") == "Tool result:\n2"
    await environment.close()


async def test_code_and_the_end_may_come_in_one_message(make: EnvironmentFactory) -> None:
    environment = await opened(make, Task(key="t", prompt="p", verifier=VERIFIER))
    await environment.reset()
    done = await environment.step(Action(episode_id="e", attempt=1, turn=0, text="```python\nx = 3\n```\n3\n<done>"))
    assert (done.terminated, done.tool_calls, done.tool_errors) == (True, 1, 0)
    assert (await environment.verify()).reward == 1.0
    await environment.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I think.", "No code found"),
        ('<tool_call>{"name": "bash", "arguments": {}}</tool_call>', 'unknown tool "bash". Available tools: python'),
        ('<tool_call>{"name": "python", "arguments": {"code": 3}}</tool_call>', 'python needs "code", a text'),
        ("```python\nprint(1)\n```\n```python\nprint(2)\n```", "1\n(1 further tool call not executed"),
        ("import os\n```py\nimport os; os._exit(5)\n```", "[exit code 5]\n[the interpreter ended, its variables are lost]"),
    ],
)
async def test_whatever_the_policy_says_is_answered(make: EnvironmentFactory, text: str, words: str) -> None:
    environment = await opened(make, Task(key="t", prompt="p"))
    await environment.reset()
    assert words in await step(environment, text)
    assert "Tool result:\n2" in await step(environment, "```python\nprint(1 + 1)\n```")
    assert (await environment.verify()).reward is None
    await environment.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"setup": "raise KeyError('a')"}, "the setup of task t failed: KeyError: 'a'"),
        ({"setup": 3}, "setup must be Python source"),
        ({"seconds": -1}, "seconds is -1; it must be a number above 0"),
    ],
)
async def test_a_task_that_cannot_begin_is_no_fault_of_the_policy(
    make: EnvironmentFactory, config: dict[str, object], words: str
) -> None:
    environment = make()
    with pytest.raises(EnvironmentFailed, match=words.replace("(", r"\(")):
        await environment.open(Task(key="t", prompt="p", config=config))
    await environment.close()


def test_where_nothing_isolates_coding_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_detected", {backends.KINDS: "nothing here"})
    with pytest.raises(UserError, match="install bubblewrap"):
        build_environment_factory("coding", verifier=Verifier())


async def test_with_the_template_s_own_prompt_every_call_is_answered_by_role_and_plain_words_are_the_answer() -> None:
    try:
        await find_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    verifier = Verifier(VerifierLimits(seconds=40))
    factory = build_environment_factory("coding", verifier=verifier, prompt="template")
    calls = tuple(ToolCall(name="python", arguments={"code": f"print({number})"}, id=f"c{number}") for number in (7, 8))
    async with verifier.run(), factory.run():
        environment = await opened(factory, Task(key="t", prompt="Compute 6 * 7."))
        start = await environment.reset()
        assert [tool.name for tool in start.tools] == ["python"]
        with anyio.fail_after(50):
            done = await environment.step(Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=calls))
            broken = await environment.step(Action(episode_id="e", attempt=1, turn=1, text="", tool_call_errors=("not JSON",)))
            last = await environment.step(Action(episode_id="e", attempt=1, turn=2, text="<think>easy</think>42"))
        await environment.close()
    assert [(message.role, message.tool_call_id) for message in done.messages] == [("tool", "c7"), ("tool", "c8")]
    assert "7" in str(done.messages[0].content)
    assert "not executed" in str(done.messages[1].content)
    assert [(message.role, message.content) for message in broken.messages] == [
        ("user", "Error: malformed tool call: not JSON")
    ]
    assert last.terminated
