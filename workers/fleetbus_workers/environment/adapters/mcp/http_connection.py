"""A connection to an MCP server over streamable HTTP. Above it are the factories of environments, below it the SDK's client.

HTTP adds ways of dying that are no tool's fault: a gateway that answers for a dead server, a session that the server has
forgotten because the server restarted, a refused key. Each of them is `ServerGone`, never an error for the policy to read.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INVALID_REQUEST

from fleetbus.config.load import strip_credentials
from fleetbus_workers.environment.adapters.mcp.client import (
    ClientConnection,
    ConnectionHost,
    describe_closed_connection,
    describe_root_cause,
)
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.serving.bounded_http import bound

CONNECT_SECONDS = 30.0
"""For a connection, for sending a request, and for a free place in the pool; answers are bounded per call."""

REFUSALS = {401: "refused the key", 403: "refused the key", 407: "refused the key", 429: "refused for too many requests"}
ABSENT = (404, 405, 410)


class EndpointAbsent(EnvironmentFailed):
    """There is a server, and no MCP endpoint at that address."""


class LastResponse:
    """The last HTTP answer on one connection, on which one call is made at a time."""

    def __init__(self) -> None:
        self.status = 0
        self.is_json = False

    async def record(self, response: httpx2.Response) -> None:
        self.status = response.status_code
        self.is_json = response.headers.get("content-type", "").lower().startswith("application/json")

    def diagnose(self, error: MCPError) -> str:
        """A JSON-RPC error is the server's own word; any other bad answer comes from what stands in its place."""
        if describe_closed_connection(error) or self.status < 300:
            return describe_closed_connection(error)
        if self.status in REFUSALS:
            return f"{REFUSALS[self.status]} (HTTP {self.status})"
        if self.status == 404 and error.error.code == INVALID_REQUEST:
            return "no longer knows this session: it was restarted"
        if (
            self.status < 400 or self.status in ABSENT or self.status >= 502 or not self.is_json
        ):  # listing and calling are methods that it had
            return f"answered HTTP {self.status}"
        return ""


def http_connection(
    url: str, host: ConnectionHost, *, call_seconds: float, headers: Mapping[str, str] | None = None, key_variable: str = ""
) -> ClientConnection:
    """A connection to ``url``, not yet open; opening raises `EndpointAbsent` if no MCP endpoint is there.

    ``key_variable`` is named where the server refuses the key, or none was sent to it."""
    answer = LastResponse()
    return ClientConnection(
        partial(_open_url, url, dict(headers or {}), answer, key_variable),
        host,
        call_seconds=call_seconds,
        diagnose=answer.diagnose,
    )


@asynccontextmanager
async def _open_url(
    url: str, headers: dict[str, str], answer: LastResponse, key_variable: str, spawned: Callable[[], None]
) -> AsyncIterator[Client]:
    spawned()
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)
    opened, hooks = False, bound(httpx2, redirects=True)  # those within its origin
    try:
        async with (
            httpx2.AsyncClient(
                headers=headers,
                timeout=timeout,
                verify=_load_tls_context(),
                event_hooks={"request": hooks["request"], "response": [answer.record, *hooks["response"]]},
            ) as http_client,
            Client(streamable_http_client(url, http_client=http_client), cache=None) as client,
        ):
            opened = True
            yield client
    except Exception as error:  # a server may answer in any way; its cause is the episode's
        cause = describe_root_cause(error)
        if answer.status in (401, 403):
            cause = "refused the key" if headers else "wants a key"
            cause += f", which is read from {key_variable}" if key_variable else ""
        reason = f"{strip_credentials(url)}: {cause}"
        if not opened and answer.status in ABSENT:
            raise EndpointAbsent(f"{reason} (HTTP {answer.status})") from error
        raise EnvironmentFailed(f"{reason} (HTTP {answer.status})" if answer.status >= 400 else reason) from error


@cache
def _load_tls_context() -> ssl.SSLContext:
    """Reading the system's certificates takes tens of milliseconds: once is enough."""
    return ssl.create_default_context()
