"""The OpenEnv gateway's HTTP routes, and sessions with names: over HTTP, over sockets that break off, by other gateways."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest

from tests.support.openenv_gateway import GatewayFixtures, gateway

pytestmark = pytest.mark.integration

ROUTES = {
    ("POST", "/reset"), ("POST", "/step"), ("GET", "/state"), ("GET", "/metadata"), ("GET", "/health"), ("GET", "/schema"),
    ("POST", "/mcp"), ("WS", "/mcp"), ("WS", "/ws"), ("GET", "/list_environments"), ("GET", "/{env_name}/splits"),
    ("POST", "/{env_name}/tasks"), ("POST", "/{env_name}/num_tasks"), ("POST", "/{env_name}/task"),
    ("POST", "/{env_name}/task_range"), ("GET", "/openapi.json"),
}  # fmt: skip
"""Those of openenv 0.10's own server in simulation mode, but for its pages for people (/docs, /redoc, /web)."""


class Http:
    def __init__(self, here: GatewayFixtures, client: httpx.AsyncClient, prefix: str) -> None:
        self._client = client
        self.base = here.url + prefix

    async def post(self, route: str, **fields: Any) -> httpx.Response:
        return await self._client.post(self.base + route, json=fields, timeout=40)

    async def told(self, route: str, **fields: Any) -> dict[str, Any]:
        response = await self.post(route, **fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def get(self, route: str) -> httpx.Response:
        return await self._client.get(self.base + route)


async def test_health_metadata_schemas_and_environments_are_told() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "")
        assert (await http.get("/health")).json() == {"status": "healthy"}
        told = (await http.get("/metadata")).json()
        assert set(told) == {"name", "description", "readme_content", "version", "author", "documentation_url"}
        assert set((await http.get("/schema")).json()) == {"action", "observation", "state", "reset_observation"}
        assert (await http.get("/list_environments")).json() == ["fleetbus"]
        assert (await http.get("/fleetbus/splits")).status_code == 501
        assert (await http.post("/fleetbus/tasks", split="train")).status_code == 501
        assert (await http.post("/other/task", split="train", index=0)).status_code == 404
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert {"/reset", "/step", "/state", "/mcp"} <= set(paths)


def test_all_routes_of_the_protocol_s_own_server_are_there() -> None:
    from starlette.routing import Mount, Route

    from fleetbus_workers.gateway.openenv_app import OpenEnvGateway, OpenEnvSettings

    found: set[tuple[str, str]] = set()
    for route in OpenEnvGateway(lambda: None, OpenEnvSettings()).application().routes:  # type: ignore[arg-type, return-value]
        if not isinstance(route, Mount):
            methods = route.methods - {"HEAD"} if isinstance(route, Route) and route.methods else {"WS"}
            found |= {(method, route.path) for method in methods}  # type: ignore[attr-defined]
    assert found == ROUTES


async def test_without_a_name_a_reset_is_an_environment_for_itself_and_a_step_is_refused() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "")
        told = await http.told("/reset", seed=7, prompt="Add to", episode_id="E1")
        assert (told["observation"]["text"], told["reward"], told["done"]) == ("Add to 7", None, False)
        assert told["metadata"] == {"score": "NaN"}
        refused = await http.post("/step", action={"text": "x"})
        assert (refused.status_code, "reset first" in refused.json()["detail"]) == (409, True)
        assert (await http.get("/state")).json() == {"episode_id": None, "step_count": 0}
        assert here.world.opened == here.world.closed == 1
        await here.empty()


async def test_a_whole_episode_is_played_over_http_under_a_name() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "/sessions/trial-1")
        assert (await http.post("/step", action={"text": "early"})).status_code == 409
        await http.told("/reset", seed=3, episode_id="E1")
        for turn, done in enumerate((False, False, True), 1):
            told = await http.told("/step", action={"text": f"t{turn}"}, timeout_s=30)
            assert (told["observation"]["text"], told["reward"], told["done"]) == (f"t{turn}", 0.5, done)
            assert set(told) == {"observation", "reward", "done", "metadata"}
            assert (await http.get("/state")).json()["step_count"] == turn
        assert (await http.get("/state")).json()["episode_id"] == "E1"
        await here.empty()
        assert here.world.opened == here.world.closed == 1, "an episode that is done holds no slot"
        await http.told("/reset", seed=4)
        assert (await http.get("/state")).json()["step_count"] == 0


async def test_a_step_that_is_repeated_under_its_request_id_is_executed_once_also_the_last_one() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "/sessions/trial-2")
        for episode in range(2):
            await http.told("/reset", seed=episode)
            for turn in range(3):
                step = {"action": {"text": f"e{episode}t{turn}"}, "request_id": f"r{turn}"}
                assert await http.told("/step", **step) == await http.told("/step", **step)
                assert (await http.get("/state")).json()["step_count"] == turn + 1
        assert here.world.steps == [f"e{episode}t{turn}" for episode in range(2) for turn in range(3)]


async def test_another_step_under_the_same_request_id_is_an_error() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "/sessions/trial-3")
        await http.told("/reset")
        await http.told("/step", action={"text": "a"}, request_id="r")
        assert (await http.post("/step", action={"text": "b"}, request_id="r")).status_code == 500
        assert here.world.steps == ["a"]


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/reset", b"{broken", 422),
        ("/reset", b"[1]", 422),
        ("/reset", b'{"seed": -1}', 422),
        ("/reset", b'{"episode_id": 5}', 422),
        ("/step", b"{}", 422),
        ("/step", b'{"action": {"wrong": 1}}', 422),
        ("/step", b'{"action": {"text": "x"}, "timeout_s": 0}', 422),
        ("/step", b'{"action": {"text": "x"}, "request_id": 7}', 422),
        ("/step", b'{"action": {"text": "boom"}}', 500),
        ("/reset", b'{"x": "' + b"x" * (17 << 20) + b'"}', 413),
    ],
)
async def test_what_is_wrong_with_a_request_is_told(route: str, body: bytes, status: int) -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        http = Http(here, client, "/sessions/wrong")
        await http.told("/reset")
        response = await client.post(http.base + route, content=body, timeout=40)
        assert response.status_code == status, response.text
        detail = response.json()["detail"]
        assert isinstance(detail, list) == (status == 422)
        assert status != 500 or "boom!" in detail


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "x" * 101])
async def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        assert (await client.post(f"{here.url}/sessions/{name}/reset", json={})).status_code == 404


async def test_over_capacity_a_reset_over_http_waits_and_then_says_so() -> None:
    async with gateway(slots=1, capacity_timeout=0.5) as here, httpx.AsyncClient() as client, here.socket() as socket:
        await socket.ask("reset")
        full = await Http(here, client, "/sessions/late").post("/reset")
        assert (full.status_code, "capacity" in full.json()["detail"]) == (503, True)
        await socket.connection.close()
        assert (await Http(here, client, "/sessions/late").told("/reset"))["done"] is False


async def test_a_named_session_goes_on_over_another_socket_and_ends_when_its_client_says_so() -> None:
    async with gateway() as here:
        async with here.socket(session="s1") as socket:
            await socket.ask("reset", seed=1)
            await socket.ask("step", text="one")
            socket.connection.transport.abort()
        async with here.socket(session="s1") as socket:
            assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 1
            assert (await socket.ask("step", text="two"))["data"]["observation"]["text"] == "two"
            await socket.connection.send('{"type": "close"}')
            await socket.connection.wait_closed()
        await here.empty()
        assert (here.world.steps, here.world.opened, here.world.closed) == (["one", "two"], 1, 1)


async def test_a_newer_socket_takes_a_session_over_from_one_that_is_half_open() -> None:
    async with gateway() as here, here.socket(session="s2") as old:
        await old.ask("reset")
        await old.ask("step", text="one")
        async with here.socket(session="s2") as new:
            await new.ask("step", text="two")
            await old.connection.wait_closed()
            assert (await new.ask("step", text="three"))["data"]["done"] is True


async def test_a_named_session_whose_client_never_comes_back_frees_its_slot() -> None:
    async with gateway(slots=1, resume_timeout=0.3) as here:
        async with here.socket(session="s3") as socket:
            await socket.ask("reset")
            socket.connection.transport.abort()
        await here.empty()
        assert here.world.closed == 1


async def test_a_step_whose_answer_was_lost_is_joined_by_its_repetition_over_a_new_socket() -> None:
    async with gateway() as here:
        frame = json.dumps({"type": "step", "data": {"text": "slow", "metadata": {"request_id": "r1"}}})
        async with here.socket(session="s4") as socket:
            await socket.ask("reset")
            await socket.connection.send(frame)
            await here.world.stepping.wait()
            socket.connection.transport.abort()
        async with here.socket(session="s4") as socket:
            assert (await socket.send(frame))["data"]["observation"]["text"] == "slow"
            assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 1
        assert here.world.steps == ["slow"]


async def test_another_gateway_goes_on_with_a_named_session() -> None:
    async with gateway() as here, here.another() as other, httpx.AsyncClient() as client:
        first, second = Http(here, client, "/sessions/moved"), Http(other, client, "/sessions/moved")
        await first.told("/reset", seed=5)
        await first.told("/step", action={"text": "one"}, request_id="a")
        assert (await second.get("/state")).json()["step_count"] == 1
        repeated = await second.told("/step", action={"text": "one"}, request_id="a")
        assert repeated["observation"]["text"] == "one"
        await second.told("/step", action={"text": "two"})
        told = await first.told("/step", action={"text": "three"})
        assert told["done"] is True
        assert (await first.get("/state")).json()["step_count"] == 3
        assert here.world.steps == ["one", "two", "three"]


async def test_episode_after_episode_is_found_again_by_another_gateway() -> None:
    async with gateway() as here, httpx.AsyncClient() as client:
        for number in range(6):
            await Http(here, client, "/sessions/many").told("/reset", difficulty=number)
        async with here.another() as other:
            http = Http(other, client, "/sessions/many")
            await http.told("/step", action={"text": "x"})
            assert (await http.get("/state")).json()["episode_id"] == "many-5"


async def test_tools_can_be_listed_and_called_over_a_socket_of_their_own() -> None:
    async with gateway() as here, here.socket(route="/mcp") as socket:
        listed = await socket.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}))
        assert listed["result"]["tools"][0]["name"] == "add"
        call = {"name": "add", "arguments": {"a": 2, "b": 3}}
        called = await socket.send(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}))
        assert called["result"]["data"] == "5"
        assert (await socket.send("nonsense"))["error"]["code"] == -32700
        assert (await socket.send('{"jsonrpc": "2.0", "id": 3, "method": "initialize"}'))["error"]["code"] == -32601
        assert here.world.opened == 1


async def test_a_tool_that_does_not_exist_costs_no_step() -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "nope"}}
        assert (await socket.ask("mcp", **call))["data"]["error"]["code"] == -32603
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 0


async def test_tools_without_a_session_get_an_environment_for_themselves() -> None:
    async with gateway() as here:
        assert (await here.rpc("tools/list"))["result"]["tools"][0]["name"] == "add"
        assert (await here.rpc("tools/call", name="add", arguments={"a": 1, "b": 2}))["result"]["data"] == "3"
        assert here.world.opened == here.world.closed == 2


async def test_a_session_made_over_http_is_used_by_http_and_socket_at_once_and_outlives_the_socket() -> None:
    async with gateway() as here:
        session = (await here.rpc("openenv/session/create", seed=1))["result"]["session_id"]
        async with here.socket(f"?session_id={session}") as socket:
            await socket.ask("step", text="x")
            called = await here.rpc("tools/call", session_id=session, name="add", arguments={"a": 1, "b": 2})
            assert called["result"]["data"] == "3"
            assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 2
        assert (await here.rpc("tools/list", session_id=session))["result"]["tools"]
        assert (await here.rpc("openenv/session/close", session_id=session))["result"]["closed"] is True
        assert (await here.rpc("openenv/session/close", session_id=session))["error"]["code"] == -32602
        await here.empty()


async def test_named_sessions_have_a_limit() -> None:
    async with gateway(max_sessions=1) as here, httpx.AsyncClient() as client:
        await Http(here, client, "/sessions/one").told("/reset")
        full = await Http(here, client, "/sessions/two").post("/reset")
        assert full.status_code == 503
        assert (await here.rpc("openenv/session/create"))["error"]["code"] == -32000


async def test_a_body_that_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.serving.request_body.BODY_SECONDS", 0.2)
    head = b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    async with gateway() as here, await anyio.connect_tcp("127.0.0.1", int(here.url.rpartition(":")[2])) as stream:
        await stream.send(head)
        assert b" 408 " in await stream.receive()
