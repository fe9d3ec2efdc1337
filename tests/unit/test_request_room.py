"""Requests to a server that reads nothing for a while: each is sent once there is room, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import anyio
import pytest

from fleetbus.bus.nats.api import JetStreamApi
from fleetbus.bus.nats.request_mux import RequestMux
from fleetbus.bus.nats.wire import Wire
from fleetbus.bus.streams import API
from fleetbus.errors import RequestUnanswered
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


class FullWire:
    """A connection with room for a command or without. ``sent`` has the commands that were sent."""

    ready = True
    room = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.was_sent = anyio.Event()
        self._answer: Callable[[bytes, bytes, bytes, bytes | None], None]

    def open_route(self, subject: str, handler: Callable[[bytes, bytes, bytes, bytes | None], None]) -> None:
        self._answer = handler

    def has_room(self, *, again: bool) -> bool:
        return self.room

    def send(self, command: bytes) -> None:
        self.sent.append(command)
        self.was_sent.set()

    def answer(self, reply: str) -> None:
        self._answer(reply.encode(), b"", b"done", None)


def make_mux() -> tuple[FullWire, RequestMux]:
    wire = FullWire()
    return wire, RequestMux(cast(Wire, wire), "_INBOX_x")


@pytest.mark.parametrize("resend_seconds", [0.0, 2.0])
async def test_a_request_that_found_no_room_is_sent_soon_after_there_is_some(resend_seconds: float) -> None:
    wire, mux = make_mux()
    reply, answers = mux.new_reply(), list[bytes]()

    async def ask() -> None:
        answers.append((await mux.ask(reply, b"command", timeout=30, resend_seconds=resend_seconds))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.05)
        assert wire.sent == []
        wire.room = True
        with anyio.fail_after(1):
            await wire.was_sent.wait()
        assert wire.sent == [b"command"]
        wire.answer(reply)
    assert answers == [b"done"]


@pytest.mark.integration
async def test_a_request_that_is_made_once_is_sent_once_after_it_found_room() -> None:
    wire, mux = make_mux()
    began = anyio.current_time()

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await mux.ask(mux.new_reply(), b"command", timeout=1.5)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.05)
        wire.room = True
    assert anyio.current_time() - began >= 1.5
    assert wire.sent == [b"command"]


async def test_what_must_not_be_done_later_is_not_kept_for_room_nor_for_a_reconnect() -> None:
    """A server that comes back may hold an older log, in which a removal means other entries."""
    wire, mux = make_mux()
    with anyio.fail_after(0.1), pytest.raises(RequestUnanswered, match="reads nothing"):
        await JetStreamApi(mux, API).ask_once("STREAM.PURGE.fb_r", {"seq": 3})
    wire.room = True
    mux.resend_all()
    await anyio.sleep(0.5)
    assert wire.sent == []
