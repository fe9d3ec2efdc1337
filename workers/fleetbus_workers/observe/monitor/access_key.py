"""The key in the page's address: other users of the machine reach its loopback as well, and transcripts are not theirs to read.

Who opens the address that was printed gets the key as a cookie, which no page of another site can make a browser send; programs
send it as ``Authorization: Bearer``. As with Jupyter, the key is new with each start and is held nowhere.
"""

from __future__ import annotations

import secrets
from urllib.parse import parse_qs

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PARAMETER = "key"
REFUSAL = b"this page asks for a key: open the whole address that was printed where it is served, with what follows /?key=\n"


def generate_key() -> str:
    """128 random bits, as they may stand in an address."""
    return secrets.token_urlsafe(16)


class AccessKey:
    """ASGI middleware: 401 for whoever does not have ``key``. Browsers send cookies to every port of a host, so that the cookie
    is named by the port."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"fleetbus-{(scope.get('server') or ('', 0))[1]}"
        if self._is_key(parse_qs(scope["query_string"].decode("latin-1")).get(PARAMETER, [""])[0]):
            cookie = f"{name}={self._key.decode()}; Path=/; HttpOnly; SameSite=Strict"

            async def with_cookie(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (b"set-cookie", cookie.encode())]}
                await send(message)

            await self._app(scope, receive, with_cookie)
        elif self._has_key(scope, name):
            await self._app(scope, receive, send)
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _has_key(self, scope: Scope, cookie: str) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer " and self._is_key(value[7:].decode("latin-1")):
                return True
            if name == b"cookie" and self._is_key(cookie_parser(value.decode("latin-1")).get(cookie, "")):
                return True
        return False

    def _is_key(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._key)
