"""The NATS wire format, as far as this package writes and reads it by itself: commands, header blocks, ack subjects, times.

Pure functions of bytes. Above it are the wire and everything that sends; it must never know a connection.
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec

from fleetbus.errors import BusError

_ILLEGAL = re.compile(r"[\s\x00]")
_SECOND = re.compile(r"\A(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z")

NO_RESPONDERS = 503
"""Status of a request without subscribers."""


def check_subject(subject: str) -> str:
    """``subject`` unchanged; raises `BusError` for one that would break the line protocol."""
    if not subject or _ILLEGAL.search(subject):
        raise BusError(f"subject {subject!r} is empty or contains white space")
    return subject


def publish_command(subject: str, reply: str, payload: bytes) -> bytes:
    """PUB: a core message; ``reply`` may be empty."""
    return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"


def publish_with_headers_command(subject: str, reply: str, headers: bytes, payload: bytes) -> bytes:
    """HPUB: ``headers`` is a whole header block as `header_block` makes it."""
    size = len(headers)
    return b"".join((f"HPUB {subject} {reply} {size} {size + len(payload)}\r\n".encode(), headers, payload, b"\r\n"))


def subscribe_command(subject: str, identifier: int) -> bytes:
    """SUB, without a queue group; ``identifier`` comes back with each message."""
    return f"SUB {subject}  {identifier}\r\n".encode()


def unsubscribe_command(identifier: int) -> bytes:
    """UNSUB, at once."""
    return f"UNSUB {identifier}\r\n".encode()


def header_block(message_id: str, expected_last: int | None) -> bytes:
    """Headers of a stream publish: the id for the duplicate window, and the compare-and-set expectation if there is one."""
    if _ILLEGAL.search(message_id):
        raise BusError(f"message id {message_id!r} contains white space")
    if expected_last is None:
        return f"NATS/1.0\r\nNats-Msg-Id: {message_id}\r\n\r\n".encode()
    return (f"NATS/1.0\r\nNats-Msg-Id: {message_id}\r\nNats-Expected-Last-Subject-Sequence: {expected_last}\r\n\r\n").encode()


def status_of(headers: bytes | None) -> int:
    """The status code of a header block that a server made (``NATS/1.0 408 ...``), 0 if it has none.

    An entry comes with all headers of its publisher; behind these the server says where it
    stands.
    """
    if not headers or not headers.startswith(b"NATS/1.0 ") or b"\r\nNats-Sequence: " in headers:
        return 0
    code = headers[9:12]
    return int(code) if code.isdigit() else 0


def status_text(headers: bytes) -> str:
    """The words after the status code."""
    return headers[13 : headers.index(b"\r\n")].decode("utf-8", "replace")


def header_fields(headers: bytes | None) -> dict[str, str]:
    """Names and values of a header block; names as the server spells them."""
    fields: dict[str, str] = {}
    for line in (headers or b"").decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            fields[name] = value.strip()
    return fields


def make_header_block(fields: dict[str, str]) -> bytes:
    """The header block whose names, values and status nats-py found; what a publisher called ``Status`` beside the position of
    its entry is none."""
    rest = dict(fields)
    status = "" if "Nats-Sequence" in rest else rest.pop("Status", "")
    words = rest.pop("Description", "") if status else ""
    first = " ".join(["NATS/1.0", *filter(None, (status, words))])
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in rest.items()), "", ""]).encode()


class Arrival(msgspec.Struct, frozen=True):
    """The facts in a consumer's ack subject about the message it came with."""

    delivered: int
    stream_sequence: int
    consumer_sequence: int
    time_ns: int
    pending: int


def parse_ack_subject(reply: bytes) -> Arrival:
    """``$JS.ACK[.domain.account].stream.consumer.delivered.sequence.consumer_sequence.time.pending[.token]``"""
    tokens = reply.split(b".")
    first = 4 if len(tokens) < 11 else 6
    return Arrival(*map(int, tokens[first : first + 5]))


def parse_time_ns(text: str) -> int:
    """RFC 3339 with up to nine decimals, as Unix nanoseconds."""
    match = _SECOND.match(text)
    if match is None:
        raise BusError(f"{text!r} is not a time")
    second, fraction, zone = match.groups()
    seconds = datetime.fromisoformat(second + ("+00:00" if zone == "Z" else zone)).timestamp()
    return int(seconds) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
