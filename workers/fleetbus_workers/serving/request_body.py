"""Reads request bodies within limits of size and time, before any other resource is acquired."""

from __future__ import annotations

import anyio
from starlette.requests import Request

MAX_BYTES = 16 << 20
BODY_SECONDS = 30.0
"""A body that takes longer to arrive is given up."""


class BodyRefused(Exception):
    """A body that is too large (413) or too slow (408); the text says which limit."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


async def read_body(request: Request, *, limit: int = MAX_BYTES) -> bytes:
    """The whole body. Raises `BodyRefused`, and `starlette.requests.ClientDisconnect` when its sender is gone."""
    received = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limit:
                    raise BodyRefused(413, f"a request may have {limit} bytes")
    except TimeoutError:
        raise BodyRefused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(received)
