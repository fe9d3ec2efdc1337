"""The doubts of a reader about its log: each is kept until what was stored before it was looked at."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.bus.doubts import MAX_DOUBTS, add_doubts
from fleetbus.bus.nats.log_identity import LogIdentity, LogReplaced
from fleetbus.bus.nats.publisher import Stored


class OneApi:
    """Says how long the log is when it may."""

    def __init__(self) -> None:
        self.api = self
        self.may_answer = anyio.Event()
        self.is_asked = anyio.Event()
        self.last = 9

    async def ask(self, subject: str) -> dict[str, Any]:
        self.is_asked.set()
        await self.may_answer.wait()
        return {"created": "then", "state": {"last_seq": self.last}}


async def test_a_connection_that_is_lost_again_while_the_log_is_compared_is_another_doubt() -> None:
    """What was stored before the second loss may be lost, and more is stored before the next look."""
    stored, connection = [Stored("a", b"1", 5)], OneApi()
    identity = LogIdentity(connection, "s", get_last_stored=lambda: stored[-1])  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(identity.check, 0, 0)
        await connection.is_asked.wait()
        stored.append(Stored("a", b"2", 7))
        identity.doubt()
        connection.may_answer.set()
    stored.append(Stored("a", b"3", 4))
    connection.last = 6
    with pytest.raises(LogReplaced, match="ends at 6, and 7 was stored before"):
        while not await identity.check(0, 0):
            pass


async def test_a_log_that_is_lost_twice_before_anybody_looks_is_compared_with_what_was_stored_between() -> None:
    stored, connection = [Stored("a", b"1", 5)], OneApi()
    identity = LogIdentity(connection, "s", get_last_stored=lambda: stored[-1])  # type: ignore[arg-type]
    identity.doubt()
    stored.append(Stored("a", b"2", 7))
    identity.doubt()
    connection.last = 6
    connection.may_answer.set()
    with pytest.raises(LogReplaced, match="ends at 6, and 7 was stored before"):
        while not await identity.check(0, 0):
            pass


async def test_a_check_that_is_not_answered_keeps_the_doubt_that_came_meanwhile() -> None:
    stored, connection = [Stored("a", b"1", 5)], OneApi()
    identity = LogIdentity(connection, "s", get_last_stored=lambda: stored[-1])  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(identity.check, 0, 0)
        await connection.is_asked.wait()
        stored.append(Stored("a", b"2", 7))
        identity.doubt()
        tasks.cancel_scope.cancel()
    stored.append(Stored("a", b"3", 4))
    connection.last = 6
    connection.may_answer.set()
    with pytest.raises(LogReplaced, match="ends at 6, and 7 was stored before"):
        while not await identity.check(0, 0):
            pass


def test_doubts_are_each_kept_once_and_no_more_than_some() -> None:
    doubted = add_doubts(["a"], ["a", *map(str, range(99))])
    assert (doubted[:2], doubted[-1], len(doubted)) == (["a", "0"], "98", MAX_DOUBTS)
