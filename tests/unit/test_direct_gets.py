"""Histories of several subjects, as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import anyio

from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.direct import HISTORIES_AT_ONCE, get_histories

END = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n"


class CountedQuestions:
    """A server without entries that answers once nobody asks anything more."""

    def __init__(self) -> None:
        self.asked = self.under_way = self.most_under_way = 0

    def new_reply(self) -> str:
        return "reply"

    async def ask(
        self, reply: str, command: bytes, *, timeout: float, take: Callable[[bytes, bytes], bool]
    ) -> tuple[bytes, bytes]:
        self.asked += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await anyio.lowlevel.checkpoint()
        self.under_way -= 1
        take(b"", END)
        return b"", END


async def test_the_histories_of_thousands_of_subjects_are_asked_for_a_few_at_a_time() -> None:
    server = CountedQuestions()
    connection: Connection = SimpleNamespace(request_mux=server, api=SimpleNamespace(prefix="$JS.API"))  # type: ignore[assignment]
    assert await get_histories(connection, "log", [f"fb.run.act.lane{number}.e" for number in range(3000)]) == []
    assert (server.asked, server.most_under_way) == (3000, HISTORIES_AT_ONCE)
