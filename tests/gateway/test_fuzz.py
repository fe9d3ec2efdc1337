"""Bytes of any kind at the doors of the gateways: read, or refused with the typed error; never anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus_workers.environment.adapters.remote_gym.wire import decode_response
from fleetbus_workers.gateway.gym_wire import WireError, read_request, write_answer
from fleetbus_workers.gateway.openenv_frames import FrameError, read_action, read_frame
from tests.support.gym_service import Handler, serve_gym
from tests.support.openenv_gateway import gateway

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
SEGMENTS = st.sampled_from(
    [
        "",
        "connect",
        "call",
        "sessions",
        "health",
        "reset",
        "step",
        "state",
        "mcp",
        "ws",
        "schema",
        "x",
        "%00",
        "..",
        "tasks",
        "é",
    ]
)
PATHS = st.lists(SEGMENTS, max_size=4).map(lambda parts: "/" + "/".join(parts))
NAMES = ["session_id", "method", "params", "env_config", "seed", "action", "timeout_s", "request_id", "jsonrpc", "id", "text"]
WORDS = st.sampled_from(["reset", "step", "close", "system_prompt", "tools/list", "tools/call", "openenv/session/create", "s"])
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON | WORDS, max_size=5)
BODIES = (
    st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()) | FIELDS.map(lambda v: json.dumps(v).encode())
)
HEADERS = st.sampled_from(
    [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="gym_env_0123456789abcdef0123456789abcdef"',
        "multipart/mixed; boundary=b",
        "application/json",
        "\x00;;=",
    ]
)


@given(HEADERS, st.binary(max_size=2000))
def test_any_body_is_read_or_refused(content_type: str, body: bytes) -> None:
    try:
        request = read_request(content_type, body)
    except WireError:
        return
    assert isinstance(request.fields, dict) and request.key


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_any_part_is_read_or_refused(head: bytes, payload: bytes) -> None:
    body = b"--b\r\n" + head + b"\r\n\r\n" + payload + b"\r\n--b--\r\n"
    try:
        read_request("multipart/form-data; boundary=b", body)
    except WireError:
        pass


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans()), st.lists(st.binary(min_size=1), max_size=3))
def test_what_is_answered_can_be_read_back(fields: dict[str, Any], images: list[bytes]) -> None:
    decoded = decode_response(*write_answer(fields, images))
    assert list(decoded.images) == images
    assert set(decoded.fields) == set(json.loads(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")))


@settings(max_examples=40, deadline=None)
@given(st.text() | JSON.map(json.dumps) | st.none())
def test_any_frame_is_read_or_refused(text: str | None) -> None:
    try:
        kind, _ = read_frame(text)
    except FrameError:
        return
    assert isinstance(kind, str)


@pytest.mark.integration
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["type", "text", "message", "tool_name", "arguments", "x"]), JSON))
def test_any_action_is_read_or_refused(data: dict[str, Any]) -> None:
    try:
        text, calls = read_action(data)
    except FrameError:
        return
    assert isinstance(text, str) and isinstance(calls, tuple)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_nesting_is_no_way_in(depth: int) -> None:
    with pytest.raises(FrameError):
        read_frame("[" * depth)
    with pytest.raises(WireError):
        read_request("application/json", b"[" * depth)


@pytest.fixture(scope="module")
def gateway_urls() -> Iterator[dict[str, str]]:
    """Both gateways, by name, at their addresses."""
    with start_blocking_portal("asyncio") as portal:
        gym = portal.wrap_async_context_manager(serve_gym(Handler(), seconds=600))
        openenv = portal.wrap_async_context_manager(gateway(slots=64, seconds=600, capacity_timeout=0.5))
        with gym as wire, openenv as here:
            yield {"gym": wire.url, "openenv": here.url}


@pytest.fixture(scope="module")
def client(gateway_urls: dict[str, str]) -> Iterator[httpx.Client]:
    """It closes its connections before the gateways close theirs."""
    with httpx.Client(timeout=30) as made:
        yield made


@pytest.mark.integration
@pytest.mark.parametrize("door", ["gym", "openenv"])
@settings(max_examples=60, deadline=None)
@given(METHODS, PATHS, HEADERS, BODIES, st.text(max_size=20))
def test_any_request_is_answered_and_none_by_a_crash(
    client: httpx.Client,
    gateway_urls: dict[str, str],
    door: str,
    method: str,
    path: str,
    content_type: str,
    body: bytes,
    query: str,
) -> None:
    headers = {"Content-Type": content_type.replace("\x00", "")}
    response = client.request(method, gateway_urls[door] + path, params={"session_id": query}, headers=headers, content=body)
    assert response.text != "Internal Server Error", (response.request.url, body)
    assert response.status_code < 500 or "detail" in response.json()
