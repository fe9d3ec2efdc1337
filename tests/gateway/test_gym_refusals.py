"""Refusals of the remote-gym service, over real HTTP: wrong keys, calls and bodies that are wrong, more than it takes."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from tests.support.gym_service import Handler, serve_gym

pytestmark = pytest.mark.integration


async def test_the_key_is_asked_for_by_header_or_query() -> None:
    async with serve_gym(Handler(), api_key="secret") as wire:
        assert (await wire.get("/health")).json()["ok"] is True
        assert (await wire.get("/sessions")).status_code == 401
        wrong = await wire.post("/connect", {}, headers={"X-API-Key": "wrong"})
        assert (wrong.status_code, wrong.json()) == (401, {"detail": "unauthorized"})
        assert (await wire.post("/connect", {}, headers={"X-API-Key": "secret"})).status_code == 200
        assert (await wire.post("/connect", {}, params={"token": "secret"})).status_code == 200
        assert (await wire.post("/connect", {}, params={"token": "é"}, headers={"X-API-Key": "secret"})).status_code == 401


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({}, 400, "session_id required"),
        ({"session_id": "s"}, 400, "method required"),
        ({"session_id": "s", "method": "dance"}, 400, "dance"),
        ({"session_id": "s", "method": "step", "params": 3}, 400, "params"),
        ({"session_id": "never", "method": "step"}, 404, "Session never not found"),
        ({"session_id": "never", "method": "system_prompt"}, 404, "Session never not found"),
        ({"session_id": "a.b", "method": "step"}, 404, "Session a.b not found"),
        ({"session_id": "s", "method": "reset", "params": {"seed": "x"}}, 400, "seed"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told(fields: dict[str, Any], status: int, detail: str) -> None:
    async with serve_gym(Handler()) as wire:
        response = await wire.post("/call", fields)
        assert response.status_code == status
        assert detail in response.json()["detail"]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain", b"hello"),
        ("multipart/form-data", b"no boundary"),
        ('multipart/form-data; boundary="b"', b"--b\r\n\r\nnot closed"),
        ('multipart/form-data; boundary="b"', b"--b\r\nContent-Type: application/json\r\n\r\n{broken\r\n--b--\r\n"),
        ("application/json", b"[1, 2]"),
        ("application/json", b'{"a":' * 100_000),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_and_makes_no_session(content_type: str, body: bytes) -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        response = await wire.request("POST", "/connect", content=body, headers={"Content-Type": content_type})
        assert response.status_code == (415 if content_type == "text/plain" else 400)
        assert json.loads(response.content)["detail"]
    assert handler.created == 0


async def test_other_methods_and_larger_bodies_are_refused() -> None:
    async with serve_gym(Handler()) as wire:
        assert (await wire.get("/connect")).status_code == 405
        too_large = await wire.request("POST", "/connect", content=b"x" * ((16 << 20) + 1))
        assert too_large.status_code == 413


async def test_when_too_many_calls_run_the_next_is_told_to_come_again() -> None:
    handler = Handler()
    handler.step_seconds = 1.0
    async with serve_gym(handler, max_inflight=1, admit_timeout=0.1) as wire:
        session = (await wire.connect())["session_id"]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: wire.call(session, "step", action_str="a"))
            await handler.stepping.wait()
            busy = await wire.post("/connect", {})
            assert (busy.status_code, busy.json()["detail"]) == (503, "server busy")


async def test_more_sessions_than_allowed_are_refused_by_the_known_words() -> None:
    async with serve_gym(Handler(max_sessions=1)) as wire:
        await wire.connect()
        refused = await wire.post("/connect", {"env_config": {}})
        assert refused.status_code == 503
        assert "Max sessions limit reached (1)" in refused.json()["detail"]


@pytest.mark.parametrize("parameters", [{"action_str": "\ud800"}, {"action_str": "x" * (2 << 20)}])
async def test_a_call_that_cannot_be_encoded_is_refused_and_the_session_goes_on(parameters: dict[str, Any]) -> None:
    handler = Handler()
    async with serve_gym(handler) as wire:
        session = (await wire.connect())["session_id"]
        fields = {"session_id": session, "method": "step", "params": parameters}
        headers = {"Content-Type": "application/json"}
        refused = await wire.request("POST", "/call", content=json.dumps(fields).encode(), headers=headers)
        assert (refused.status_code, "cannot be encoded" in refused.json()["detail"]) == (400, True)
        assert (await wire.call(session, "step", action_str="a"))["obs"] == "1"
    assert handler.steps == ["a"]
