"""Context tools beside a server's own, in whole episodes: what the policy sees, what is trained, what a replay repeats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from mcp.server import Server, ServerRequestContext
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent, Tool

from fleetbus.config.settings import EnvironmentSettings, InferenceSettings
from fleetbus_schemas import Action, ContextChange, Task
from fleetbus_workers.environment.adapters.mcp.connection import DirectConnection, ToolResult
from fleetbus_workers.environment.adapters.mcp.context_tools import ContextTools
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.inference.scripted import ScriptedTemplate
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.tool_calls import ConstantGrader

ROWS = "\n".join(f"row {number}" for number in range(1, 2001))
TASK = Task(key="t", prompt="Find row 1234.", verifier="graded")
WITH_STATUS = build_configuration(
    environment=EnvironmentSettings(slots=2, context_status=True),
    inference=InferenceSettings(slots=4, max_model_len=1 << 20),
)


def serve(*names: str) -> Server[Any]:
    async def listing(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name=name, input_schema={"type": "object"}) for name in names or ("rows",)])

    async def calling(_: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        return CallToolResult(content=[TextContent(text=ROWS)])

    return Server("table", on_list_tools=listing, on_call_tool=calling)


def make(**options: Any) -> Callable[[], McpEnvironment]:
    given: dict[str, Any] = {"grader": ConstantGrader(), "prompt": "compact", "output_chars": 600, **options}
    return lambda: McpEnvironment(lambda _: DirectConnection(serve(), {}), **given)


class Script(ScriptedTemplate):
    """A policy that says these texts, one after another, whatever it sees."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def decode_text(self, ids: Sequence[int]) -> str:
        return self._texts.pop(0)


def calling(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def test_a_cut_output_is_searched_and_every_observation_ends_with_the_budget() -> None:
    script = Script(
        calling("rows"),
        calling("search_tool_output", '{"pattern": "row 1234"}'),
        calling("search_history", '{"pattern": "find row"}'),
        "It is there. <done>",
    )
    with anyio.fail_after(50):
        async with small_deployment(WITH_STATUS) as fleet:
            fleet.environment("environment", make=make())
            fleet.inference("inference", template=script)
            await fleet.request("e", task=TASK, max_turns=9)
            result = await fleet.result("e")
            first, *observations = await fleet.observations()
            actions = await fleet.actions()
            await fleet.drain_members()
    assert (result.outcome, result.reward, result.turns, result.tool_calls) == ("completed", 1.0, 4, 1)
    assert '"name": "view_tool_output"' in str(first.messages[0].content)
    texts = [str(observation.messages[-1].content) for observation in observations]
    assert "[TRUNCATED - " in texts[0]
    assert "1234: row 1234" in texts[1]
    assert "message 1 (user): Find row 1234." in texts[2]
    used = 0
    for turn, (text, action) in enumerate(zip(texts, actions, strict=False), 1):
        used += len(action.prompt_delta + action.sampled) // 4
        assert text.endswith(f"\n[Context: {used:,}/30,720 tokens ({round(100 * used / 30_720)}%), Turn {turn}/9]")
    assert result.tokens == sum(len(action.prompt_delta + action.sampled) // 4 for action in actions)


async def test_after_dropped_turns_the_budget_is_that_of_the_context_that_is_left() -> None:
    script = Script(calling("rows"), calling("rows"), calling("manage_context", '{"keep_recent_turns": 1}'), "<done>")
    with anyio.fail_after(50):
        async with small_deployment(WITH_STATUS) as fleet:
            fleet.environment("environment", make=make())
            fleet.inference("inference", template=script)
            await fleet.request("e", task=TASK, max_turns=9)
            result = await fleet.result("e")
            *_, last = await fleet.observations()
    origin = last.origin
    assert origin is not None and [segment.turns for segment in result.segments] == [3, 1]
    held = origin.kept + origin.repeated
    assert 0 < held < result.segments[0].tokens
    assert f"[Context: {held:,}/" in str(last.messages[-1].content)


async def test_outputs_of_megabytes_are_looked_through_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.environment.adapters.mcp.context_tools.LARGE_CHARACTERS", 1000)
    threads: list[int] = []
    real = ContextTools.call

    def call(self: ContextTools, *arguments: Any) -> ToolResult:
        threads.append(threading.get_ident())
        return real(self, *arguments)

    monkeypatch.setattr(ContextTools, "call", call)
    environment = make()()
    await environment.open(TASK)
    await environment.reset()
    for text in (calling("check_context"), calling("rows"), calling("search_tool_output", '{"pattern": "row 7"}')):
        await environment.step(Action(episode_id="e", attempt=1, turn=0, text=text))
    await environment.close()
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_who_steps_the_environment_is_asked_to_drop_turns_and_the_policy_is_told_so() -> None:
    environment = make()()
    await environment.open(TASK)
    await environment.reset()
    call = calling("manage_context", '{"keep_recent_turns": 2}')
    stepped = await environment.step(Action(episode_id="e", attempt=1, turn=0, text=call))
    played = await environment.step(Action(episode_id="e", attempt=1, turn=1, text=call, sampled=b"\x01\0\0\0"))
    await environment.close()
    assert stepped.context == played.context == ContextChange(keep_turns=2)
    assert "Your client was asked to keep only the task and the last 2 turns." in str(stepped.messages[0].content)
    assert "The context is now the task and its last 2 turns." in str(played.messages[0].content)


async def test_a_server_with_a_tool_of_the_same_name_is_refused_by_name() -> None:
    environment = McpEnvironment(
        lambda _: DirectConnection(serve("rows", "check_context"), {}),
        grader=ConstantGrader(),
        prompt="compact",
        output_chars=600,
    )
    with pytest.raises(EnvironmentFailed, match="the server has check_context as well"):
        await environment.open(TASK)
    await environment.close()
