"""Reads request bodies within limits of size and time, before any other resource is acquired."""

import asyncio

from starlette.requests import ClientDisconnect, Request

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
        async with asyncio.timeout(BODY_SECONDS):  # a server's own loop: a third of what a scope of anyio costs
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                received += message.get("body", b"")
                if len(received) > limit:
                    raise BodyRefused(413, f"a request may have {limit} bytes")
                if not message.get("more_body", False):
                    return bytes(received)
    except TimeoutError:
        raise BodyRefused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
