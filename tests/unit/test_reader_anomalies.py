"""A reader whose deliveries show that something is wrong: it asks for them again, or says that the log is another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fleetbus.bus.nats.reader import NatsReader
from fleetbus.errors import BusError
from tests.support.backends import asyncio_alone


class Wire:
    """What is sent is lost."""

    ready = True

    def open_route(self, *_: Any, **__: Any) -> int:
        return 1

    def send(self, *_: Any) -> None:
        pass

    close_route = redirect_route = send_or_drop = send


class Api:
    """A server whose log ends at 10."""

    prefix = "$JS.API"

    async def ask(self, subject: str, _: Any = None) -> dict[str, Any]:
        return {"created": "2026", "state": {"last_seq": 10}} if subject.startswith("STREAM.INFO") else {"num_pending": 1}


anyio_backend = asyncio_alone


@pytest.fixture
async def reader() -> NatsReader:
    connection: Any = SimpleNamespace(reader_names=(), wire=Wire(), api=Api(), new_inbox=lambda: "inbox")
    return NatsReader(connection, "s", ("a.>",), 1)


def arrive(reader: NatsReader, *, sequence: int, time_ns: int, number: int = 1, pending: int = 0) -> None:
    """The ``number``th message of the consumer; ``pending`` more are to come."""
    reply = b"$JS.ACK.s.c.1.%d.%d.%d.%d" % (sequence, number, time_ns, pending)
    reader._pull_requests._on_wire(b"a.1", reply, b"x", None)


async def attach(reader: NatsReader) -> None:
    assert await reader._attach()
    await anyio.lowlevel.checkpoint()  # the pull request is sent


async def test_a_log_that_turns_out_to_be_another_is_no_end_of_what_is_read(reader: NatsReader) -> None:
    """What a scan found until then would be taken for all."""
    await attach(reader)
    arrive(reader, sequence=10, time_ns=1000, pending=90)
    entry = await reader.receive_until(100)
    assert entry is not None and entry.sequence == 10
    reader._drop_consumer()
    await attach(reader)
    arrive(reader, sequence=10, time_ns=2000)
    with pytest.raises(BusError, match="entry 10 of stream s is not the one that was read before"):
        await reader.receive_until(100)


async def test_no_number_of_gaps_leaves_a_reader_without_credits(reader: NatsReader) -> None:
    await attach(reader)
    credits = reader._pull_requests.asked
    for _ in range(5):
        arrive(reader, sequence=5, time_ns=1000, number=2, pending=90)  # the first was lost on its way
        assert reader._restart.is_set()
        reader._drop_consumer()
        await attach(reader)
    assert reader._pull_requests.asked == credits


async def test_a_consumer_that_was_given_up_in_silence_is_deleted_again_when_the_server_answers(
    reader: NatsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, which heard nothing, keeps it for a minute: a key that counts its readers has no name left for that long."""
    deleted: list[str] = []
    await attach(reader)
    monkeypatch.setattr(reader, "_delete", deleted.append)
    monkeypatch.setattr(reader._pull_requests, "is_silent", lambda: True)
    lost = reader._consumer
    reader._drop_consumer()
    assert await reader._attach()
    assert deleted == [lost, lost]
    monkeypatch.setattr(reader._pull_requests, "is_silent", lambda: False)
    heard = reader._consumer
    reader._drop_consumer()
    assert await reader._attach()
    assert deleted == [lost, lost, heard]
