"""Clients that people use, each with its own loop, unmodified: `just test-agents`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.specs import build_environment_factory
from tests.agents.client_agents import AGENTS, PROMPT, REPEATS_NO_LOST

SCRIPT = Path(__file__).with_name("client_agents.py")
PROXY = str(SCRIPT.with_name("faulty_proxy.py"))
PYTHON = os.environ.get("AGENTS_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`"),
]


def look(at: int) -> ToolCall:
    return ToolCall(name="look", arguments={"at": at}, id=f"call0000{at}")


def act(text: str, *calls: ToolCall) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text, tool_calls=calls)


@pytest.mark.parametrize("way", ["", "faulty"])
@pytest.mark.parametrize("client", AGENTS)
async def test_a_clients_own_loop_calls_tools_side_by_side_and_answers(client: str, way: str) -> None:
    """On a faulty way its own repetitions get the answer that was lost, and no other is sampled."""
    settings = Configuration(environment=EnvironmentSettings(agent_reward_url=True, agent_files=PROXY))
    spec = f"agent:{PYTHON} {SCRIPT} {client} {way}"
    factory = build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]
    with anyio.fail_after(280):
        async with factory.run():
            environment: Any = factory()
            try:
                await play(environment, client)
                assert environment._session.repeated == (1 if way and client not in REPEATS_NO_LOST else 0)
            finally:
                await environment.close()


async def play(environment: Any, client: str) -> None:
    await environment.open(Task(key="t", prompt=PROMPT))
    start = await environment.reset()
    assert PROMPT in start.messages[-1].content and "look" in {tool.name for tool in start.tools}
    step = await environment.step(act("I look.", look(1), look(2)))
    if client == "smolagents":  # writes its history anew, calls and results as text
        assert step.context.reason == "history_edited"
        step = await environment.step(act("", ToolCall(name="final_answer", arguments={"answer": "30"}, id="c3")))
        assert step.terminated and (await environment.verify()).reward == 1.0
        return
    results = {message.tool_call_id: message.content for message in step.messages if message.role == "tool"}
    assert results == {"call00001": "10", "call00002": "20"}, step.messages
    assert step.context is None, "the call continues the one before"
    assert (await environment.step(act("30"))).terminated
    assert (await environment.verify()).reward == 1.0
