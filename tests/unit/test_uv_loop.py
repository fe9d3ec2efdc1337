"""The loop of contract tests leaves out one error of uvloop's, and no other."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import uv_loop
from tests.support.uv_loop import UvLoop, is_late_handshake


def collect(run: Callable[[asyncio.AbstractEventLoop], Any]) -> list[dict[str, Any]]:
    loop, seen = UvLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    try:
        loop.run_until_complete(run(loop))
    finally:
        loop.close()
    return seen


def test_the_error_of_a_connection_that_breaks_before_its_handshake_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by what uvloop starts TLS with, over a transport that is closed meanwhile."""
    found: list[bool] = []

    def watch(context: dict[str, Any]) -> bool:
        found.append(is_late_handshake(context))
        return found[-1]

    monkeypatch.setattr(uv_loop, "is_late_handshake", watch)

    async def connect_and_break(loop: asyncio.AbstractEventLoop) -> None:
        here, there = socket.socketpair()
        with here, there:
            transport, protocol = await loop.create_connection(asyncio.Protocol, sock=here)
            context = ssl.create_default_context()
            transport.abort()
            starting = asyncio.ensure_future(loop.start_tls(transport, protocol, context, server_hostname="x"))
            await asyncio.wait([starting], timeout=0.5)

    assert collect(connect_and_break) == []
    assert found == [True]


def test_another_error_of_a_callback_is_reported() -> None:
    async def fail(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon([].pop)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    (context,) = collect(fail)
    assert isinstance(context["exception"], IndexError)
