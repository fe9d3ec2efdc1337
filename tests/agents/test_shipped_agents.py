"""Claude Code and Codex as they are shipped, as `agent:SPEC` inside the default sandbox: `just test-agents`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.specs import build_environment_factory
from tests.agents.shipped_agent import AGENTS

SCRIPT = Path(__file__).with_name("shipped_agent.py")
MODULES = Path(os.environ.get("AGENTS_NPM") or "/nonexistent", "node_modules")
PROGRAMS = {
    "claude_code_streamed": "@anthropic-ai/claude-code-*/claude",
    "codex_streamed": "@openai/codex-*/vendor/*/bin/codex",
}
"""The native programs inside the packages: their starters in JavaScript only find them."""

COMMAND = "echo hello > made.txt; head -1 /proc/self/status"
CALLS = {"Bash": {"command": COMMAND, "description": "Make it"}, "exec_command": {"cmd": COMMAND}}
"""What makes the file, by the name of the agent's own shell."""

TURNS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not MODULES.is_dir(), reason="AGENTS_NPM names no folder with the agents: `just test-agents`"),
]


class FileGrader:
    """The reward is 1 if the agent's file says hello."""

    async def verify(self, code: str, *, final_answer: str | None, conversation: Any, tools: Any) -> Verdict:
        content = await tools.call_tool("read_file", {"path": "made.txt"})
        return Verdict(reward=float(content == "hello\n" and final_answer == "It is made."))


def find_program(name: str) -> Path:
    programs = sorted(MODULES.glob(PROGRAMS[name]))
    assert programs, f"{MODULES} has no {PROGRAMS[name]}"
    return programs[0]


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_as_shipped_runs_its_own_shell_in_the_default_sandbox(name: str) -> None:
    settings = Configuration(environment=EnvironmentSettings(agent_isolation="required"))
    spec = f"agent:{sys.executable} {SCRIPT} {name} {find_program(name)}"
    factory = build_environment_factory(spec, verifier=FileGrader(), configuration=settings)  # type: ignore[arg-type]
    with anyio.fail_after(360):
        async with factory.run():
            environment: Any = factory()
            try:
                await environment.open(Task(key="t", prompt="Make the file made.txt that says hello.", verifier="graded"))
                told = await play(environment)
                assert "Name:\thead" in told, "what the agent started reads /proc"
                assert (await environment.verify()).reward == 1.0
            finally:
                await environment.close()


async def play(environment: Any) -> str:
    """Call the agent's shell once, where it is offered; returns what came back."""
    step = await environment.reset()
    tools, told = step.tools, ""
    for turn in range(TURNS):
        results = [message.content for message in step.messages if message.role == "tool"]
        told += "".join(results)
        shells = [tool.name for tool in tools if tool.name in CALLS]
        asked = bool(shells) and not results
        calls = (ToolCall(name=shells[0], arguments=CALLS[shells[0]], id="c1"),) if asked else ()
        text = "I make it." if asked else "It is made."
        step = await environment.step(Action(episode_id="e", attempt=1, turn=turn, text=text, tool_calls=calls))
        if step.terminated:
            return told
        tools = step.context.tools if step.context is not None else tools
    raise AssertionError(f"it called {TURNS} times and did not end")
