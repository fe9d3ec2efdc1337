"""The key in the page's address: who has it reads, nobody else, and no other page of the browser can use it."""

from __future__ import annotations

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fleetbus_workers.observe.monitor.access_key import AccessKey, generate_key
from tests.support.backends import asyncio_alone

KEY = "aKeyThatOnePageHas0123"


async def answer(_: Request) -> PlainTextResponse:
    return PlainTextResponse("transcripts")


APP = AccessKey(Starlette(routes=[Route("/{rest:path}", answer)]), KEY)

anyio_backend = asyncio_alone


def client(port: int = 8450) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=APP), base_url=f"http://127.0.0.1:{port}")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", {}),
        ("?key=", {}),
        ("?key=wrong", {}),
        (f"?key={KEY[:-1]}", {}),
        ("?key=%ff%00", {}),
        ("", {"authorization": "Bearer wrong"}),
        ("", {"authorization": KEY}),
        ("", {"cookie": "fleetbus-8450=wrong"}),
        ("", {"cookie": f"fleetbus-9999={KEY}"}),
        ("", {"cookie": "=;;\x01"}),
    ],
)
async def test_without_the_key_nothing_is_read(query: str, headers: dict[str, str]) -> None:
    async with client() as browser:
        for path in ("/", "/api/overview", "/page/app.js"):
            refused = await browser.get(path + query, headers=headers)
            assert refused.status_code == 401
            assert "transcripts" not in refused.text
            assert "set-cookie" not in refused.headers


def test_every_page_has_a_key_of_its_own() -> None:
    assert len({generate_key() for _ in range(100)}) == 100


@pytest.mark.anyio
async def test_the_address_gives_a_cookie_that_scripts_and_other_sites_do_not_get() -> None:
    async with client() as browser:
        opened = await browser.get(f"/?key={KEY}")
        assert opened.status_code == 200
        assert opened.headers["set-cookie"] == f"fleetbus-8450={KEY}; Path=/; HttpOnly; SameSite=Strict"
        assert (await browser.get("/api/overview")).text == "transcripts"


@pytest.mark.anyio
async def test_programs_send_the_key_as_a_bearer_token() -> None:
    async with client() as program:
        assert (await program.get("/api/overview", headers={"authorization": f"bearer {KEY}"})).status_code == 200


@pytest.mark.anyio
async def test_a_cookie_of_another_program_on_this_host_keeps_nobody_out() -> None:
    async with client() as browser:
        cookies = f'settings={{"a": 1, "b c": [2]}}; fleetbus-8450={KEY}'
        assert (await browser.get("/api/overview", headers={"cookie": cookies})).status_code == 200


@pytest.mark.anyio
async def test_two_pages_of_one_machine_do_not_take_each_others_cookie() -> None:
    async with client(8450) as browser:
        await browser.get(f"/?key={KEY}")
        assert "fleetbus-8450" in browser.cookies
        await anyio.lowlevel.checkpoint()
    async with client(8451) as other:
        await other.get(f"/?key={KEY}")
        assert "fleetbus-8451" in other.cookies


def test_every_start_has_a_key_of_its_own() -> None:
    assert len({generate_key() for _ in range(100)}) == 100
