"""HTTP/1.1 connections read by httptools, a third of the CPU of h11, with the limits that uvicorn's use of it has not.

httptools reads all that arrived at once: a head beyond 64 KiB is refused as soon as that shows, what is no HTTP after requests
that are in work is refused once these are answered, and only so many requests may be sent ahead. Below it is
`fleetbus_workers.serving.connections`, which has the limits of time.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fleetbus_workers.serving.connections import BoundedProtocol

MAX_HEAD_BYTES = 64 << 10
MAX_REQUESTS_AHEAD = 1024
"""That wait behind the one in work; as many were read already when it is noticed, each some 2 KiB."""


class QuickProtocol(BoundedProtocol, HttpToolsProtocol):
    """One connection."""

    _is_between = _is_in_body = False
    _progressed = False
    _unread = 0
    """Bytes that came after the last head, body or end of a request."""
    _refusal = ""

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        self._progressed = False
        super().data_received(data)
        self._unread = 0 if self._progressed else self._unread + len(data)
        if self._unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_REQUESTS_AHEAD:
            raise ValueError("the head is too long, or too many requests were sent ahead")
        if any(value.strip().lower() != b"chunked" for name, value in self.headers if name == b"transfer-encoding"):
            raise ValueError("a body is sent as it is or chunked")
        super().on_headers_complete()
        self._progressed = self._is_in_body = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._progressed = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._progressed, self._is_in_body, self._is_between = True, False, True

    def send_400_response(self, msg: str) -> None:
        """At once, or after the answers to earlier requests; what comes later is not read."""
        self._refusal = msg
        if self.cycle is None or self.cycle.response_complete or (self._is_in_body and not self.cycle.response_started):
            super().send_400_response(msg)
        elif self._is_in_body:
            self.abort_connection()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal and self.cycle.response_complete and not self.transport.is_closing():
            super().send_400_response(self._refusal)

    def _between_requests(self) -> bool:
        return self._is_between and self._progressed
