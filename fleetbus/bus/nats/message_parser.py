"""Reads what a server sends: messages are dispatched at once, all other lines are returned for nats-py to read.

Messages are nearly all there is; they are found by their line ends, without a regular expression, a copy of the buffer or a
turn of the loop for each. Above it is the socket; below it nothing. Whatever a server sends, what is kept of it is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

from nats.errors import ProtocolError

Dispatch = Callable[[int, bytes, bytes, bytes, bytes | None], None]
"""Called with the subscription's number, subject, reply subject, payload and raw header block."""

MAX_FRAME_BYTES = 65 << 20
"""No server sends more in one message: 64 MiB is the most that its ``max_payload`` can be."""

MAX_LINE_BYTES = 1 << 20
"""The longest line is that of INFO, with the addresses of a whole cluster."""

_FORBIDDEN = b"permissions violation"
"""The only error of a server that leaves the connection as it is."""


class MessageParser:
    """The parser of one connection; ``dispatch`` gets the messages."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._rest = bytearray()
        self._wanted = 0
        self._is_over = False

    def feed(self, data: bytes) -> list[bytes]:
        """Dispatch the messages in ``data`` and what was left before it; returns the other whole lines in between, with their
        ends. Raises `ProtocolError` for what is no protocol. Nothing is read behind an error that ends the connection."""
        if self._rest:
            self._rest.extend(data)
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        lines: list[bytes] = []
        start = 0
        while not self._is_over and (start := self._dispatch_messages(data, start)) < len(data):
            line_end = data.find(b"\r\n", start)
            if self._wanted or line_end < 0:
                if len(data) - start >= max(self._wanted, MAX_LINE_BYTES):
                    raise ProtocolError("nats: endless line")
                self._rest.extend(memoryview(data)[start:])
                break
            lines.append(_check_line(data[start : line_end + 2]))
            self._is_over = is_error(lines[-1]) and not is_forbidden(lines[-1])
            start = line_end + 2
        return lines

    def _dispatch_messages(self, data: bytes, start: int) -> int:
        """Offset at which what is no whole message begins; if it is a part of one, ``_wanted`` says how long that is."""
        end = len(data)
        self._wanted = 0
        while start < end:
            if data.startswith(b"MSG ", start):
                has_headers = False
            elif data.startswith(b"HMSG ", start):
                has_headers = True
            else:
                return start
            line_end = data.find(b"\r\n", start)
            if line_end < 0:
                return start
            fields = data[start:line_end].split()
            least = 5 if has_headers else 4
            try:
                if not least <= len(fields) <= least + 1:
                    raise ValueError("the number of fields")
                number, size = int(fields[2]), int(fields[-1])
                head = int(fields[-2]) if has_headers else 0
                if not 0 <= head <= size <= MAX_FRAME_BYTES:
                    raise ValueError("the sizes")
            except ValueError as error:
                raise ProtocolError("nats: malformed MSG") from error
            body = line_end + 2
            following = body + size + 2
            if following > end:
                self._wanted = following - start
                return start
            reply = fields[3] if len(fields) > least else b""
            headers = data[body : body + head] if has_headers else None
            start = following
            self._dispatch(number, fields[1], reply, data[body + head : following - 2], headers)
        return start


def is_error(line: bytes) -> bool:
    """True for a line by which the server says that something is wrong."""
    return line[:4].upper() == b"-ERR"


def is_forbidden(error: bytes) -> bool:
    """True for an error line about a subject that the user may not use."""
    return _FORBIDDEN in error.lower()


def _check_line(line: bytes) -> bytes:
    if line.startswith((b"MSG", b"HMSG")):  # nats-py would wait for its payload
        raise ProtocolError("nats: malformed MSG")
    return line
