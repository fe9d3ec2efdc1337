"""Answers of servers that may be bad, bounded while they are read: in bytes and in values, for every HTTP client.

`bound` gives the event hooks of an httpx (or httpx2) client, so that no caller has to remember it, and proxies stay in use.
What exceeds a bound is an error of the transport, as a broken connection is. Texts are UTF-8, whatever an answer says: it
could name a codec that takes hours, as punycode does. Where no redirect is followed its address is not even read: one that is
none would raise what no caller expects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fleetbus_workers.serving.bounded_json import MAX_VALUES, count_marks

MAX_ANSWER_BYTES = 32 << 20
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


def bound(
    library: Any, *, max_bytes: int = MAX_ANSWER_BYTES, max_values: int = MAX_VALUES, redirects: bool = False
) -> dict[str, list[Any]]:
    """Event hooks for a client of ``library`` (httpx or httpx2), with which answers have at most ``max_bytes`` and, as JSON,
    ``max_values`` values; of a stream of events, each event. How long an answer may take is the caller's to bound. With
    ``redirects`` the caller follows them."""

    class Bounded(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, response: Any) -> None:
            kind = response.headers.get("content-type", "").lower()
            self._stream = response.stream
            self._is_events = kind.startswith("text/event-stream")
            self._is_json = "json" in kind or self._is_events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            count = values = 0
            async for chunk in self._stream:
                if self._is_events and any(end in chunk for end in EVENT_ENDS):
                    count = values = 0
                count += len(chunk)
                if self._is_json:
                    values += count_marks(chunk)
                if count > max_bytes or values > max_values:
                    limit = f"{max_bytes} bytes" if count > max_bytes else f"{max_values} values"
                    raise library.ReadError(f"the answer has more than {limit}")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def ask_for_plain(request: Any) -> None:
        request.headers["accept-encoding"] = "identity"

    async def bound_answer(response: Any) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise library.ReadError("the answer is compressed, which was not asked for")
        if not redirects:
            response.headers.pop("location", None)
        response.encoding = "utf-8"
        response.stream = Bounded(response)

    return {"request": [ask_for_plain], "response": [bound_answer]}
