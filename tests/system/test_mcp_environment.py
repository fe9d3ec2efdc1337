"""Episodes over MCP with servers in this process: prompts, observations, images, verdicts, and how tools fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import date
from functools import partial
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer, Server, ServerRequestContext
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from fleetbus.core.text.prompts import NO_CALL
from fleetbus_schemas import Action, Image, Task, Text, ToolCall
from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_server
from fleetbus_workers.environment.adapters.mcp.connection import Connection, DirectConnection
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.isolation.verifier import VerifierTools
from tests.support.tool_calls import call, read_step_text, say

TASK = Task(key="t", prompt="Do it.", verifier="def verify(env): return 1", env_variables={"REGION": "EU"})
SCHEMA = {"type": "object"}


class RecordingGrader:
    """Stands in for the sandbox: keeps what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        self.given = {"code": code, "final_answer": final_answer, "conversation": conversation, "tools": tools}
        return Verdict(reward=0.5)


class Toolbox:
    """A server of our own with one tool for everything that can go wrong."""

    def __init__(self) -> None:
        self.started, self.cancelled, self.closed = anyio.Event(), anyio.Event(), 0

    def serve(self) -> Server[Any]:
        server = Server[Any]("toolbox", on_list_tools=self._list, on_call_tool=self._call)
        server.close = self._close  # type: ignore[attr-defined]
        return server

    def _close(self) -> None:
        self.closed += 1

    async def _list(self, _: ServerRequestContext[Any], params: PaginatedRequestParams | None) -> ListToolsResult:
        names = ("echo", "raise") if params is None or params.cursor is None else ("hang", "large", "image", "refuse", "data")
        return ListToolsResult(
            tools=[Tool(name=name, input_schema=SCHEMA) for name in names], next_cursor="2" if "echo" in names else None
        )

    async def _call(self, _: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        match params.name:
            case "raise":
                raise ZeroDivisionError
            case "hang":
                self.started.set()
                try:
                    await anyio.sleep_forever()
                finally:
                    self.cancelled.set()
            case "large":
                return CallToolResult(content=[TextContent(text="é" * 10_000_000)])
            case "image":
                return CallToolResult(content=[TextContent(text="see"), ImageContent(data="AAAA", mime_type="image/png")])
            case "refuse":
                return CallToolResult(content=[TextContent(text="Error: not today")])
            case "data":
                return CallToolResult(content=[], structured_content={"x": [1]})
        return CallToolResult(content=[TextContent(text=json.dumps(params.arguments))])


def direct(server: Server[Any]) -> Callable[[Task], Connection]:
    return lambda _: DirectConnection(server, {})


def make_environment(connect: Callable[[Task], Connection], **given: Any) -> McpEnvironment:
    options: dict[str, Any] = {"grader": RecordingGrader(), "prompt": "compact", **given}
    return McpEnvironment(connect, **options)


@asynccontextmanager
async def playing(environment: McpEnvironment, task: Task = TASK) -> AsyncIterator[Start]:
    with anyio.fail_after(50):
        await environment.open(task)
        try:
            yield await environment.reset()
        finally:
            await environment.close()


async def test_every_page_of_tools_is_read_and_told_once() -> None:
    environment = make_environment(direct(Toolbox().serve()))
    async with playing(environment) as start:
        system, user = start.messages
        assert [message.role for message in start.messages] == ["system", "user"]
        assert user.content == "Do it."
        assert all(f'"name": "{name}"' in system.content for name in ("echo", "raise", "hang", "data"))
        assert start.tools == ()


async def test_a_chat_template_is_given_the_tools_instead_of_a_prompt() -> None:
    async with playing(make_environment(direct(Toolbox().serve()), prompt="template")) as start:
        assert [message.role for message in start.messages] == ["user"]
        assert [tool.name for tool in start.tools][:2] == ["echo", "raise"]


async def test_the_fleet_prompt_has_date_and_variables() -> None:
    environment = make_environment(direct(Toolbox().serve()), prompt="fleet", today=lambda: date(2026, 5, 18))
    async with playing(environment) as start:
        assert "2026-05-18" in start.messages[0].content
        assert "- REGION: EU" in start.messages[0].content


async def test_observations_say_what_happened() -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()))):
        assert read_step_text(await environment.step(call("echo", x="é"))) == 'Tool result:\n{"x": "\\u00e9"}'
        assert read_step_text(await environment.step(call("data"))) == 'Tool result:\n{\n  "x": [\n    1\n  ]\n}'
        assert read_step_text(await environment.step(call("image"))) == "Tool result:\nsee\n[image, image/png, 3 bytes]"
        assert read_step_text(await environment.step(say("I think."))) == NO_CALL
        assert read_step_text(await environment.step(say("<tool_call>{'name'}</tool_call>"))) == NO_CALL


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("refuse", "Error: not today"),
        ("raise", "Error: the tool failed (ZeroDivisionError)"),
        ("absent", 'Error: unknown tool "absent". Available tools: echo, raise, hang, large, image, refuse, data'),
    ],
)
async def test_a_failing_call_is_an_observation_and_is_counted(tool: str, text: str) -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()))):
        step = await environment.step(call(tool))
        assert read_step_text(step) == text
        assert (step.tool_calls, step.tool_errors, step.terminated) == (1, 1, False)
        assert (await environment.state())["tool_errors"] == 1


async def test_images_follow_the_text_by_reference_and_what_is_none_or_too_large_stays_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fleetbus_workers.environment.adapters.mcp.connection.MAX_IMAGES", 2)
    monkeypatch.setattr("fleetbus_workers.environment.adapters.mcp.connection.MAX_IMAGE_BYTES", 9)
    sent = ("/9j/AAAA", "?", "/9j/" * 4, "/9j/BBBB", "/9j/CCCC", "AAAA")
    blocks: list[Any] = [ImageContent(data=data, mime_type="image/jpeg") for data in sent]

    async def tools(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="look", input_schema=SCHEMA)])

    async def look(_: ServerRequestContext[Any], __: CallToolRequestParams) -> CallToolResult:
        return CallToolResult(content=blocks)

    async def store_image(picture: EncodedImage) -> Image:
        return Image(object=picture.data.hex(), media_type=picture.media_type)

    environment = make_environment(direct(Server("camera", on_list_tools=tools, on_call_tool=look)), store_image=store_image)
    async with playing(environment):
        (message,) = (await environment.step(call("look"))).messages
        text, *images = message.content
        assert isinstance(text, Text)
        assert text.text.count("[image, image/jpeg, ") == 6
        assert images == [Image(object=name, media_type="image/jpeg") for name in ("ffd8ff000000", "ffd8ff041041")]


async def test_only_the_first_call_is_executed_and_the_others_are_reported() -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()))):
        text = call("echo", x=1).text + call("raise").text + call("echo", x=3).text
        step = await environment.step(say(text))
        assert read_step_text(step) == 'Tool result:\n{"x": 1}\n(2 further tool calls not executed: one per message.)'
        assert step.tool_calls == 1


async def test_calls_that_the_inference_worker_parsed_are_used() -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()))):
        action = Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=(ToolCall(name="echo", arguments={"y": 2}),))
        assert read_step_text(await environment.step(action)) == 'Tool result:\n{"y": 2}'


async def test_a_large_result_is_cut_with_a_notice() -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()), observation_bytes=1000)):
        text = read_step_text(await environment.step(call("large")))
        assert 900 < len(text.encode()) <= 1000
        assert text.endswith("[TRUNCATED - 10000013 chars total]")


async def test_nan_and_surrogates_in_arguments_do_no_harm() -> None:
    async with playing(environment := make_environment(direct(Toolbox().serve()))):
        text = '<tool_call>{"name": "echo", "arguments": {"x": NaN, "y": "\\ud800"}}</tool_call>'
        assert read_step_text(await environment.step(say(text))).startswith('Tool result:\n{"x": ')


async def test_the_answer_and_the_conversation_reach_the_grader() -> None:
    environment = make_environment(direct(Toolbox().serve()), grader=(grader := RecordingGrader()))
    async with playing(environment):
        await environment.step(call("echo", x=1))
        step = await environment.step(say("It is 1. <done>"))
        assert (step.terminated, step.messages) == (True, ())
        assert await environment.verify() == Verdict(reward=0.5)
        assert (await environment.call_tool("echo", {"x": 5}), grader.given["final_answer"]) == ('{"x": 5}', "It is 1.")
        assert [message["role"] for message in grader.given["conversation"]] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        with pytest.raises(LookupError, match="not today"):
            await environment.call_tool("refuse", {})
        with pytest.raises(LookupError, match="no database"):
            await environment.query("SELECT 1", [])


async def test_a_call_beside_the_end_mark_is_executed_before_the_end() -> None:
    environment = make_environment(direct(Toolbox().serve()), grader=(grader := RecordingGrader()))
    async with playing(environment):
        step = await environment.step(say(call("echo", x=1).text + " <done>"))
        assert (step.terminated, step.tool_calls, step.messages) == (True, 1, ())
        await environment.verify()
        assert grader.given["conversation"][-1] == {"role": "user", "content": 'Tool result:\n{"x": 1}'}


async def test_an_unfinished_episode_has_no_answer_and_a_task_without_verifier_no_verdict() -> None:
    environment = make_environment(direct(Toolbox().serve()), grader=(grader := RecordingGrader()))
    async with playing(environment):
        await environment.step(say("82"))
        await environment.verify()
        assert grader.given["final_answer"] is None
    async with playing(environment := make_environment(direct(Toolbox().serve())), Task(key="t", prompt="p")):
        assert (await environment.verify()).reward is None


async def test_a_hung_call_is_cancelled_in_the_tool_itself() -> None:
    toolbox = Toolbox()
    async with playing(environment := make_environment(direct(toolbox.serve()))):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.step, call("hang"))
            await toolbox.started.wait()
            tasks.cancel_scope.cancel()
        assert toolbox.cancelled.is_set()
        assert read_step_text(await environment.step(call("echo"))) == "Tool result:\n{}"
    assert toolbox.closed == 1
    await environment.close()
    assert toolbox.closed == 1


async def test_a_server_without_tools_fails_the_episode() -> None:
    async def nothing(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[])

    environment = make_environment(direct(Server("empty", on_list_tools=nothing)))
    with pytest.raises(EnvironmentFailed, match="lists no tools"):
        await environment.open(TASK)
    await environment.close()


async def test_tools_are_asked_for_once_if_the_server_says_that_they_are_fixed() -> None:
    class Fixed(Server[Any]):
        tools_are_fixed = True

    asked = 0

    async def count(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        nonlocal asked
        asked += 1
        return ListToolsResult(tools=[Tool(name="f", input_schema=SCHEMA)])

    for kind, expected in ((Fixed, 1), (Server, 3)):
        asked, listings = 0, {}  # type: ignore[var-annotated]
        for _ in range(3):
            connection = DirectConnection(kind("s", on_list_tools=count), listings)
            assert [tool.name for tool in await connection.list_tools()] == ["f"]
        assert asked == expected


async def test_a_high_level_server_and_its_lifespan_live_as_long_as_the_episode() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        async with anyio.create_task_group():
            events.append("begin")
            yield
        events.append("end")

    server = MCPServer("friendly", lifespan=lifespan)

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    host = ConnectionHost()
    async with host.run():
        environment = make_environment(lambda _: ClientConnection(partial(open_server, server), host))
        async with playing(environment):
            assert read_step_text(await environment.step(call("add", a=40, b=2))) == "Tool result:\n42"
            failed = await environment.step(call("add", a="x"))
            assert read_step_text(failed).startswith("Error: ")
            assert events == ["begin"]
        assert events == ["begin", "end"]
