"""Reads what a server sends: messages without a regular expression, a copy of the buffer and a turn of the loop for each.

nats-py's parser tries its patterns one after another on a buffer that it shortens after every message. Here messages, which
are nearly all there is, are found by their line ends and dispatched at once; anything else is left to nats-py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

Dispatch = Callable[[int, bytes, bytes, bytes, bytes | None], None]
"""Called with the subscription's number, subject, reply subject, payload and raw header block."""


class MessageParser(Parser):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's parser; ``dispatch`` gets the messages."""

    def __init__(self, client: Any, dispatch: Dispatch) -> None:
        super().__init__(client)
        self._dispatch = dispatch

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_MSG_PAYLOAD:  # a message came in part, and its first line was read
            await super().parse(data)
            return
        if self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        rest = self._dispatch_messages(data)
        if rest < len(data):
            await super().parse(data[rest:] if rest else data)

    def _dispatch_messages(self, data: bytes) -> int:
        """Where what is no whole message begins."""
        start, end = 0, len(data)
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
            except ValueError as error:
                raise ProtocolError("nats: malformed MSG") from error
            reply = fields[3] if len(fields) > least else b""
            body = line_end + 2
            if body + size + 2 > end:
                return start
            headers = data[body : body + head] if has_headers else None
            self._dispatch(number, fields[1], reply, data[body + head : body + size], headers)
            start = body + size + 2
        return start
