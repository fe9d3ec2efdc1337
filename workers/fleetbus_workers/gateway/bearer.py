"""A token that clients have to send: names of sessions are chosen by clients, and not secret. Health needs no token."""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health"})
POLICY_VIOLATION = 1008


class Guarded:
    """Requests and WebSockets without ``Authorization: Bearer TOKEN`` are refused before anything is read of them."""

    def __init__(self, application: ASGIApp, token: str) -> None:
        self._application = application
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._expected):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # before it is accepted: HTTP 403
                    return
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse({"detail": "unauthorized"}, status_code=401, headers=headers)(scope, receive, send)
                return
        await self._application(scope, receive, send)
