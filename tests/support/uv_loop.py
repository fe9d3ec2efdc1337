"""uvloop without one error of its own: a connection that breaks before its TLS handshake began fails a callback there.

Its ``SSLProtocol.connection_made`` writes to the transport that is closed by then. Who connects is told, as of any
connection that breaks; the callback's exception is reported beside it, and a test would fail by it.
"""

from __future__ import annotations

import traceback
from typing import Any

import uvloop


class UvLoop(uvloop.Loop):
    """Reports every other exception of callbacks."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not is_late_handshake(context):
            super().call_exception_handler(context)


def is_late_handshake(context: dict[str, Any]) -> bool:
    """True of that one error."""
    error = context.get("exception")
    if not isinstance(error, RuntimeError) or "the handler is closed" not in str(error):
        return False
    places = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(place.endswith("SSLProtocol.connection_made") for place in places)
