"""A web page on another site, in a browser that reaches a gateway or the monitor's page: it plays and reads nothing."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from fleetbus_workers.serving.browser_guard import GuardSettings, is_allowed_host
from tests.support.backends import asyncio_alone
from tests.support.gym_service import Handler, serve_gym
from tests.support.monitor_page import open_empty_run
from tests.support.openenv_gateway import gateway

FOREIGN = "https://evil.example"

anyio_backend = asyncio_alone


@pytest.mark.parametrize("route", ["/ws", "/mcp"])
@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://127.0.0.1:1", "https://localhost", "file://"])
async def test_a_page_opens_no_web_socket(route: str, origin: str) -> None:
    async with gateway() as served:
        address = served.url.replace("http", "ws", 1) + route
        with pytest.raises(InvalidStatus) as refused:
            await connect(address, origin=origin)  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403
        assert served.world.opened == 0


async def test_a_page_of_the_gateway_itself_and_a_program_open_web_sockets() -> None:
    async with gateway() as served:
        for options in ({}, {"origin": served.url}):
            async with connect(f"{served.url.replace('http', 'ws', 1)}/ws", **options) as socket:  # type: ignore[arg-type]
                await socket.send(json.dumps({"type": "reset", "data": {}}))
                assert json.loads(await socket.recv())["type"] != "error"


CREATE = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
SIMPLE = [
    {"content-type": "text/plain", "origin": FOREIGN},
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "application/json", "origin": FOREIGN},
    {"content-type": "application/json", "sec-fetch-site": "cross-site"},
    {"origin": FOREIGN},
    {"origin": "null", "content-type": "application/json"},
    {"sec-fetch-site": "same-site"},
    {"host": "evil.example", "content-type": "application/json"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000", "content-type": "application/json"},
    {"host": "127.0.0.1.evil.example", "content-type": "application/json"},
    {"host": "", "content-type": "application/json"},
]


@pytest.mark.parametrize("headers", SIMPLE)
@pytest.mark.parametrize(("route", "body"), [("/reset", {}), ("/mcp", CREATE)])
async def test_a_page_posts_nothing_to_the_openenv_gateway(route: str, body: Any, headers: dict[str, str]) -> None:
    async with gateway() as served, httpx.AsyncClient(trust_env=False) as client:
        response = await client.post(served.url + route, content=json.dumps(body) + " ", headers=headers)
        assert response.status_code in (400, 403, 415)
        assert served.world.opened == 0


MULTIPART = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    "headers",
    [*SIMPLE, {"content-type": MULTIPART, "origin": FOREIGN}, {"content-type": MULTIPART, "sec-fetch-site": "cross-site"}],
)
async def test_a_page_posts_nothing_to_the_gym_gateway(headers: dict[str, str]) -> None:
    handler = Handler()
    body = b'--b\r\nContent-Disposition: form-data; name="data"\r\nContent-Type: application/json\r\n\r\n{}\r\n--b--\r\n'
    if "multipart" not in headers.get("content-type", ""):
        body = b'{"env_config": {}}'
    async with serve_gym(handler) as wire:
        response = await wire.request("POST", "/connect", content=body, headers=headers)
        assert response.status_code in (400, 403, 415)
    assert handler.created == 0


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "[::1].evil.example", "a:b"])
@pytest.mark.parametrize("route", ["/", "/api/overview", "/api/episodes", "/api/events", "/page/app.js"])
async def test_a_rebound_name_reads_nothing_of_the_monitor(host: str, route: str) -> None:
    with anyio.fail_after(50):
        async with open_empty_run() as (page, _):
            assert (await page.client.get(route, headers={"host": host})).status_code == 400
            assert (await page.client.get(route, headers={"origin": FOREIGN})).status_code == 403


@pytest.mark.parametrize(
    ("host", "loopback", "beyond"),
    [
        ("127.0.0.1:8450", True, True),
        ("localhost", True, True),
        ("[::1]:8450", True, True),
        ("192.168.1.5:8450", False, True),
        ("[fd00::5]", False, True),
        ("monitor:8450", False, True),
        ("monitor.fleet.svc.cluster.local", False, True),
        ("proxy.example.org:443", True, True),
        ("evil.example", False, False),
        ("evil.example.", False, False),
        ("1.2.3.4.evil.example", False, False),
        ("127.0.0.1:8450:x", False, False),
        ("", False, False),
    ],
)
def test_beyond_loopback_a_service_answers_only_to_names_that_no_stranger_can_have(
    host: str, loopback: bool, beyond: bool
) -> None:
    listed = ("proxy.example.org",)
    assert is_allowed_host(host, GuardSettings(hosts=listed, loopback=True)) is loopback
    assert is_allowed_host(host, GuardSettings(hosts=listed, loopback=False)) is beyond
