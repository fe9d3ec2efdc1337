"""Answers to a publish: what passes is sent again under its id, what will not pass is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from fleetbus.bus.base import PublishAck
from fleetbus.bus.nats import publisher as module
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.publisher import Positions, Publisher
from fleetbus.bus.nats.request_mux import Answer
from fleetbus.errors import BusError, PublishUnanswered

pytestmark = pytest.mark.anyio

STORED: Answer = (b'{"stream": "fb_r", "seq": 7}', None)
IN_PROCESS, NO_LEADER, NOT_ALLOWED = 10158, 10008, 10052


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as the connection


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)


def refusal(code: int) -> Answer:
    return json.dumps({"error": {"code": 400, "err_code": code, "description": "so it is"}}).encode(), None


class Server:
    """Gives these answers one after another, and keeps what it was sent."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers = iter(answers)
        self.sent: list[bytes] = []

    def new_reply(self) -> str:
        return "reply"

    async def ask(self, reply: str, command: bytes, *, timeout: float, resend_seconds: float) -> Answer:
        if timeout <= 0:
            raise TimeoutError
        self.sent.append(command)
        return next(self._answers)


async def publish(server: Server, *, timeout: float = 10) -> PublishAck:
    connection: Any = SimpleNamespace(
        request_mux=server, wire=SimpleNamespace(max_payload=1 << 20), answered_at=asyncio.get_running_loop().time()
    )
    publisher = Publisher(cast(Connection, connection), Positions())
    return await publisher.publish("fb.r.e", b"x", message_id="one", expected_last=None, timeout=timeout)


@pytest.mark.parametrize("code", [IN_PROCESS, NO_LEADER], ids=["the first of two is in process", "no leader"])
async def test_a_publish_that_a_cluster_cannot_take_yet_is_sent_again_under_its_id(code: int) -> None:
    """A cluster whose majority is slow refused what was sent again while the first was under way; the worker ended of it."""
    server = Server([refusal(code)] * 3 + [STORED])
    assert (await publish(server)).sequence == 7
    assert len(server.sent) == 4
    assert len({*server.sent}) == 1


async def test_one_that_it_cannot_take_for_longer_than_the_caller_waits_is_unanswered() -> None:
    with anyio.fail_after(5), pytest.raises(PublishUnanswered, match=r"no ack within 0\.1 s"):
        await publish(Server(repeat(refusal(IN_PROCESS))), timeout=0.1)


async def test_a_refusal_that_will_not_pass_is_told_at_once() -> None:
    server = Server([refusal(NOT_ALLOWED)])
    with pytest.raises(BusError, match=r"the server refused the message: so it is \(10052\)"):
        await publish(server)
    assert len(server.sent) == 1
