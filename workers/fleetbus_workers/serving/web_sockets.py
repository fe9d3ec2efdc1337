"""Ends WebSockets whose clients are gone or stop reading: uvicorn's protocol with the limit on sending that it has not.

uvicorn closes such a connection politely, which waits for ever where bytes are left that the client never reads: the
application would never hear of it, and its session would keep its slot. Nor does it bound how many messages wait to be read:
a quarter of a megabyte of empty ones keeps everybody else waiting for seconds. Beside it is
`fleetbus_workers.serving.connections`, for HTTP.
"""

import asyncio
from typing import Any, ClassVar, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from fleetbus_workers.serving.connections import Bounds

END_SECONDS = 3.0
"""From a connection's end on our side until it is cut, even if something is left to be sent."""


MAX_WAITING_MESSAGES = 256
"""Messages of one client that nobody has read yet; one that sends more without waiting for answers is cut."""

SLICE_BYTES = 4096
"""So much is parsed at a time, before the messages in it are counted."""


class BoundedSocket(WebSocketsSansIOProtocol):
    """One WebSocket. What its client does not take within ``send_seconds`` ends it."""

    bounds: ClassVar[Bounds]
    _abort_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            super().data_received(data[start : start + SLICE_BYTES])
            if self.queue.qsize() > MAX_WAITING_MESSAGES:
                self.transport.abort()
                return

    def pause_writing(self) -> None:
        super().pause_writing()
        self._schedule_abort(self.bounds.send_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_abort()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._schedule_abort(END_SECONDS)

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._schedule_abort(END_SECONDS)

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._schedule_abort(END_SECONDS)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._schedule_abort(self.close_timeout + END_SECONDS)

    def _schedule_abort(self, seconds: float) -> None:
        self._cancel_abort()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None


def build_bounded_socket(bounds: Bounds) -> type[BoundedSocket]:
    """The protocol of one server, for `uvicorn.Config(ws=...)`."""
    return cast("type[BoundedSocket]", type("Socket", (BoundedSocket,), {"bounds": bounds}))
