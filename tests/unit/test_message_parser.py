"""Messages of a server, however the network cuts them: the same as nats-py's own parser finds."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import anyio
import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from fleetbus.bus.nats.message_parser import MAX_LINE_BYTES, MessageParser

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

MESSAGES = [
    (1, b"a.b", b"", b"hello", None),
    (12, b"a.b", b"reply.to", b"", None),
    (3, b"c", b"", b"hello", b"NATS/1.0\r\n\r\n"),
    (3, b"c", b"re.ply", b"", b"NATS/1.0 408\r\n\r\n"),
    (4, b"spaced", b"", b"MSG \r\n", None),
    (7, b"last", b"", b"\r\n", None),
]
"""Those of the stream, in their order."""


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


def parse_bare(client: Client, stream: bytes) -> None:
    anyio.run(Parser(client).parse, stream)


def parse(client: Client, pieces: list[bytes], parser: MessageParser | None = None) -> None:
    """As the socket does: the lines that are no messages go to nats-py."""
    parser, bare = parser or MessageParser(client.dispatch), Parser(client)

    async def feed() -> None:
        for piece in pieces:
            for line in parser.feed(piece):
                await bare.parse(line)

    anyio.run(feed)


def test_what_nats_py_finds_is_found_wherever_the_stream_is_cut() -> None:
    expected = Client()
    parse_bare(expected, STREAM)
    chance = random.Random(1)
    cuts = [[position] for position in range(len(STREAM))] + [sorted(chance.sample(range(len(STREAM)), 6)) for _ in range(300)]
    for places in cuts:
        client = Client()
        bounds = [0, *places, len(STREAM)]
        parse(client, [STREAM[start:end] for start, end in pairwise(bounds)])
        assert sorted(map(repr, client.seen)) == sorted(map(repr, expected.seen)), places
        assert [message for message in client.seen if isinstance(message, tuple)] == MESSAGES, places


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a b c\r\n",
        b"MSG a 1\r\n",
        b"HMSG a 1 5\r\n",
        b"NONSENSE 1\r\n",
        b"MSG a 1 -15\r\n",  # taken for a size, it would be read again and again
        b"HMSG a 1 30 20\r\n",
        b"HMSG a 1 -2 20\r\n",
        b"MSG a 1 999999999999\r\n",
        b"MSG\ta 1 20\r\n",
    ],
)
def test_what_is_no_protocol_is_an_error(line: bytes) -> None:
    client = Client()
    with pytest.raises(ProtocolError):
        parse(client, [line + b"x" * 20])
    assert client.seen == []


@pytest.mark.parametrize("beginning", [b"", b"MSG ", b"INFO {"])
def test_a_line_without_end_is_not_kept_for_ever(beginning: bytes) -> None:
    client = Client()
    with pytest.raises(ProtocolError):
        parse(client, [beginning, *[b"x" * (MAX_LINE_BYTES // 4)] * 5])


def test_an_error_of_the_server_between_messages_is_told_and_they_are_read_on() -> None:
    stream = b"MSG a 1 1\r\nx\r\n-ERR 'Permissions Violation for Publish to \"b\"'\r\nMSG a 1 1\r\ny\r\n"
    for cut in range(len(stream)):
        client = Client()
        parse(client, [stream[:cut], stream[cut:]])
        kinds = [seen if isinstance(seen, str) else seen[3] for seen in client.seen]
        assert sorted(kinds, key=str) == sorted([b"x", "'permissions violation for publish to \"b\"'", b"y"], key=str), cut


def test_of_a_connection_that_an_error_ended_nothing_more_is_read() -> None:
    client = Client()
    parse(client, [b"MSG a 1 1\r\nx\r\n-ERR 'Slow Consumer'\r\nMSG a 1 1\r\ny\r\nMSG a 1 9\r\nhal", b"MSG a 1 1\r\nz\r\n"])
    assert [message if isinstance(message, str) else message[3] for message in client.seen] == [b"x", "'slow consumer'"]


def test_a_large_message_in_many_pieces_is_read_once_it_is_there() -> None:
    client = Client()
    payload = bytes(range(256)) * 4000
    stream = b"MSG a 1 %d\r\n%b\r\nPING\r\n" % (len(payload), payload)
    parse(client, [stream[start : start + 1000] for start in range(0, len(stream), 1000)])
    assert [seen if isinstance(seen, str) else seen[3] for seen in client.seen] == [payload, "ping"]
