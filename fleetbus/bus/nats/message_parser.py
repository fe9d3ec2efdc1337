"""Reads what a server sends: messages without a regular expression, a copy of the buffer and a turn of the loop for each.

nats-py's parser tries its patterns one after another on a buffer that it shortens after every message. Here messages, which
are nearly all there is, are found by their line ends and dispatched at once; any other line is left to nats-py. What is
kept of a server's input is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

Dispatch = Callable[[int, bytes, bytes, bytes, bytes | None], None]
"""Called with the subscription's number, subject, reply subject, payload and raw header block."""

MAX_FRAME_BYTES = 65 << 20
"""No server sends more in one message: 64 MiB is the most that its ``max_payload`` can be."""

MAX_LINE_BYTES = 1 << 20
"""The longest line is that of INFO, with the addresses of a whole cluster."""


class MessageParser(Parser):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's parser; ``dispatch`` gets the messages."""

    def __init__(self, client: object, dispatch: Dispatch) -> None:
        self._resets = 0
        super().__init__(client)
        self._dispatch = dispatch

    def reset(self) -> None:
        """The connection is another one from now on."""
        super().reset()
        self._wanted = 0
        self._resets += 1

    async def parse(self, data: bytes = b"") -> None:
        if self.buf:
            self.buf.extend(data)
            if len(self.buf) < self._wanted:
                return
            data = bytes(self.buf)
            self.buf.clear()
        start = 0
        while (start := self._dispatch_messages(data, start)) < len(data):
            line_end = data.find(b"\r\n", start)
            if self._wanted or line_end < 0:
                if len(data) - start > max(self._wanted, MAX_LINE_BYTES):
                    raise ProtocolError("nats: endless line")
                self.buf.extend(memoryview(data)[start:])
                return
            resets = self._resets
            await super().parse(data[start : line_end + 2])
            if self._resets != resets:  # it led to another connection, which this is not from
                return
            if self.buf or self.state != AWAITING_CONTROL_LINE:
                raise ProtocolError("nats: unknown protocol")
            start = line_end + 2

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
