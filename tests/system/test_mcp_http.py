"""MCP over streamable HTTP: real servers on loopback, several merged, slow ones, and ones that die, restart or refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response

from fleetbus.config.settings import Configuration, LimitSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.mcp.connection import ServerGone
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.http_server import serve_application
from tests.support.tool_calls import NoGrader, call, read_step_text

TASK = Task(key="t", prompt="Do it.")


class Toolbox:
    """A server with a counter, and tools that take their time."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("count", "hang", "crawl")
        self.started, self.released = anyio.Event(), anyio.Event()
        self.calls = 0
        self.closed = 0

    def app(self) -> Any:
        server = MCPServer("toolbox")
        for name in self.names:
            server.add_tool(getattr(self, name), name=name)
        return server.streamable_http_app()

    async def count(self) -> int:
        """One more."""
        self.calls += 1
        return self.calls

    async def hang(self) -> str:
        self.calls += 1
        self.started.set()
        await self.released.wait()
        return "late"

    async def crawl(self, ctx: Context[Any]) -> str:
        """Says all the time that it moves on."""
        for step in range(12):
            await ctx.report_progress(step, 12)
            await anyio.sleep(0.1)
        return "arrived"

    async def other(self) -> str:
        return "other"


@asynccontextmanager
async def playing(spec: str, *, call_seconds: float = 60.0) -> AsyncIterator[McpEnvironment]:
    configuration = Configuration(limits=LimitSettings(tool_call=call_seconds))
    factory = build_environment_factory(spec, verifier=NoGrader(), configuration=configuration)
    with anyio.fail_after(50):
        async with factory.run():
            environment = factory()
            assert isinstance(environment, McpEnvironment)
            try:
                await environment.open(TASK)
                await environment.reset()
                yield environment
            finally:
                await environment.close()


async def find_refusal(spec: str) -> str:
    """Why an episode cannot begin."""
    factory = build_environment_factory(spec, verifier=NoGrader())
    with anyio.fail_after(50):
        async with factory.run():
            environment = factory()
            with pytest.raises(EnvironmentFailed) as caught:
                await environment.open(TASK)
            await environment.close()
    return str(caught.value)


async def test_a_server_at_a_url_is_played() -> None:
    async with serve_application((box := Toolbox()).app) as server, playing(f"http:{server.url}/mcp") as environment:
        assert read_step_text(await environment.step(call("count"))) == "Tool result:\n1"
        assert read_step_text(await environment.step(call("count"))) == "Tool result:\n2"
        assert box.calls == 2


async def test_a_bare_url_is_understood() -> None:
    async with serve_application(Toolbox().app) as server, playing(f"{server.url}/mcp") as environment:
        assert read_step_text(await environment.step(call("count"))) == "Tool result:\n1"


async def test_the_tools_of_several_servers_are_one_list_and_each_call_goes_to_its_owner() -> None:
    first, second = Toolbox("count"), Toolbox("other")
    async with serve_application(first.app) as one, serve_application(second.app) as two:
        async with playing(f"http:{one.url}/mcp,{two.url}/mcp") as environment:
            assert read_step_text(await environment.step(call("count"))) == "Tool result:\n1"
            assert read_step_text(await environment.step(call("other"))) == "Tool result:\nother"
            assert read_step_text(await environment.step(call("absent"))).endswith("Available tools: count, other")


async def test_two_servers_with_a_tool_of_one_name_are_refused_by_name() -> None:
    async with serve_application(Toolbox("count", "other").app) as one, serve_application(Toolbox("count").app) as two:
        reason = await find_refusal(f"http:{one.url}/mcp,{two.url}/mcp")
        assert reason == f"two MCP servers have a tool 'count': {one.url}/mcp and {two.url}/mcp; rename one"


async def test_the_bearer_token_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given.append(dict(scope["headers"]).get(b"authorization", b"").decode())
            await Response(status_code=401)(scope, receive, send)

    monkeypatch.setenv("MCP_BEARER_TOKEN", "very-secret")
    async with serve_application(lambda: refuse) as server:
        reason = await find_refusal(f"http:{server.url}/mcp")
    assert set(given) == {"Bearer very-secret"}
    assert "HTTP 401" in reason
    assert "very-secret" not in reason + capsys.readouterr().out


@pytest.mark.parametrize(("key", "said"), [("", "wants a key"), ("wrong", "refused the key")])
async def test_a_server_that_wants_a_key_says_where_it_is_read_from(
    monkeypatch: pytest.MonkeyPatch, key: str, said: str
) -> None:
    monkeypatch.setenv("MCP_BEARER_TOKEN", key)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response(status_code=401)(scope, receive, send)

    async with serve_application(lambda: refuse) as server:
        reason = await find_refusal(f"http:{server.url}/mcp")
    assert f"{said}, which is read from MCP_BEARER_TOKEN (HTTP 401)" in reason, reason


async def test_a_url_where_nobody_listens_fails_the_episode_by_name() -> None:
    async with serve_application(Toolbox().app) as server:
        await server.kill()
        assert f"{server.url}/mcp: All connection attempts failed" in await find_refusal(f"http:{server.url}/mcp")


async def test_an_address_without_an_endpoint_says_so() -> None:
    async with serve_application(Toolbox().app) as server:
        assert "HTTP 404" in await find_refusal(f"http:{server.url}/nothing-here")


async def test_a_server_that_dies_in_a_call_fails_the_episode() -> None:
    box = Toolbox()
    async with serve_application(box.app) as server, playing(f"http:{server.url}/mcp") as environment:
        async with anyio.create_task_group() as group:

            async def kill() -> None:
                await box.started.wait()
                await server.kill()

            group.start_soon(kill)
            with pytest.raises(ServerGone):
                await environment.step(call("hang"))
        with pytest.raises(ServerGone):
            await environment.step(call("count"))


async def test_a_server_that_was_killed_between_calls_fails_the_episode() -> None:
    async with serve_application(Toolbox().app) as server, playing(f"http:{server.url}/mcp") as environment:
        await environment.step(call("count"))
        await server.kill()
        with pytest.raises(ServerGone):
            await environment.step(call("count"))


async def test_a_call_that_is_silent_for_too_long_is_abandoned_and_not_sent_again() -> None:
    box = Toolbox()
    async with serve_application(box.app) as server, playing(f"http:{server.url}/mcp", call_seconds=0.5) as environment:
        step = await environment.step(call("hang"))
        assert (
            read_step_text(step) == "Error: the call took longer than 0.5 s and was abandoned; it may still have had its effect"
        )
        assert (step.tool_calls, step.tool_errors, box.calls) == (1, 1, 1)
        assert read_step_text(await environment.step(call("count"))) == "Tool result:\n2"


@pytest.mark.integration
async def test_a_call_that_reports_progress_may_take_longer_than_its_limit() -> None:
    async with serve_application(Toolbox().app) as server, playing(f"http:{server.url}/mcp", call_seconds=0.7) as environment:
        assert read_step_text(await environment.step(call("crawl"))) == "Tool result:\narrived"


async def test_a_gateway_that_answers_for_a_dead_server_is_no_tool_error() -> None:
    box = Toolbox("count")
    real = box.app()
    state = {"down": False}

    async def gateway(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and state["down"]:
            await PlainTextResponse("bad gateway", status_code=502)(scope, receive, send)
        else:
            await real(scope, receive, send)

    async with serve_application(lambda: gateway) as server, playing(f"http:{server.url}/mcp") as environment:
        await environment.step(call("count"))
        state["down"] = True
        with pytest.raises(ServerGone, match="HTTP 502"):
            await environment.step(call("count"))


async def test_a_session_that_a_restarted_server_has_forgotten_is_no_tool_error() -> None:
    """The older protocol has sessions: a new process behind the same address is another world."""

    def old() -> Any:
        return _old_only(Toolbox("count").app())

    async with serve_application(old) as server, playing(f"http:{server.url}/mcp") as environment:
        assert read_step_text(await environment.step(call("count"))) == "Tool result:\n1"
        await server.kill()
        await server.start()
        with pytest.raises(ServerGone, match="restarted"):
            await environment.step(call("count"))


def _old_only(app: Starlette) -> Any:
    """Refuses the newer protocol's first question, as servers of the older one do."""

    async def filtered(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if b"server/discover" in body:
            await Response(status_code=400)(scope, receive, send)
            return
        pending = [{"type": "http.request", "body": body}]

        async def replay() -> Any:
            return pending.pop() if pending else await receive()

        await app(scope, replay, send)

    return filtered


@pytest.mark.integration
async def test_a_server_that_answers_nothing_after_a_call_that_timed_out_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.environment.adapters.mcp.client.LIVENESS_SECONDS", 0.3)
    real = Toolbox("count", "hang").app()
    frozen = anyio.Event()

    async def freezing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and frozen.is_set():
            await anyio.sleep_forever()
        await real(scope, receive, send)

    async with serve_application(lambda: freezing) as server:
        async with playing(f"http:{server.url}/mcp", call_seconds=0.3) as environment:
            frozen.set()
            with pytest.raises(ServerGone, match="answers nothing"):
                await environment.step(call("count"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("http:ftp://x/mcp", "'ftp://x/mcp' is not an address"),
        ("http:localhost/mcp", "is not an address"),
        ("http:http://a/mcp,https://", "'https://' is not an address"),
        ("http:http://a:99999/mcp", "is not an address"),
        ("http:http://a:0/mcp", "is not an address"),
        ("http:http://user:word@a b/mcp", "'http://a b/mcp' is not an address"),
        ("http:http://a/mcp,http://user:word@b/mcp", "MCP_BEARER_TOKEN"),
        ("http://user:word@b/mcp", "MCP_BEARER_TOKEN"),
        ("stdio+reset=:python", "must name the tool that resets"),
        ("stdio+warm:python", "must name the tool that resets"),
    ],
)
def test_a_mistake_gets_one_line(spec: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(spec, verifier=NoGrader())
    assert words in str(caught.value)
    assert "word@" not in str(caught.value)
