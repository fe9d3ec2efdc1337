"""Messages of a server, however the network cuts them: the same as nats-py's own parser finds."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import anyio
import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from fleetbus.bus.nats.message_parser import MessageParser

STREAM = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"MSG a.b 12 reply.to 0\r\n\r\n"
    b"PING\r\n"
    b"HMSG c 3 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
    b"HMSG c 3 re.ply 16 16\r\nNATS/1.0 408\r\n\r\n\r\n"
    b"+OK\r\nPONG\r\n"
    b"MSG  spaced   4   6\r\nMSG \r\n\r\n"
    b'INFO {"a": 1}\r\n'
    b"MSG last 7 2\r\n\r\n\r\n"
)


class Client:
    """What a parser tells of, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def dispatch(self, *message: Any) -> None:
        self.seen.append(message)

    async def _process_msg(self, *message: Any) -> None:
        self.seen.append(message)

    async def _process_ping(self) -> None:
        self.seen.append("ping")

    async def _process_pong(self) -> None:
        self.seen.append("pong")

    async def _process_info(self, info: Any) -> None:
        self.seen.append(info)

    async def _process_err(self, error: str) -> None:
        self.seen.append(error)


def parse(parser: Any, pieces: list[bytes]) -> None:
    async def feed() -> None:
        for piece in pieces:
            await parser.parse(piece)

    anyio.run(feed)


def test_what_nats_py_finds_is_found_wherever_the_stream_is_cut() -> None:
    expected = Client()
    parse(Parser(expected), [STREAM])
    chance = random.Random(1)
    cuts = [[position] for position in range(len(STREAM))] + [sorted(chance.sample(range(len(STREAM)), 6)) for _ in range(300)]
    for places in cuts:
        client = Client()
        bounds = [0, *places, len(STREAM)]
        parse(
            MessageParser(client, client.dispatch),
            [STREAM[start:end] for start, end in pairwise(bounds)],
        )
        assert client.seen == expected.seen, places


@pytest.mark.parametrize("line", [b"MSG a b c\r\n", b"MSG a 1\r\n", b"HMSG a 1 5\r\n", b"NONSENSE 1\r\n"])
def test_what_is_no_protocol_is_an_error(line: bytes) -> None:
    client = Client()
    with pytest.raises(ProtocolError):
        parse(MessageParser(client, client.dispatch), [line + b"x" * 20])
    assert client.seen == []
