"""Environments over MCP servers elsewhere: at one or several URLs, or in processes that are used for many episodes.

Above it is `specs`, which reads what a user writes; below it the connections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from fleetbus.config.load import strip_credentials
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.common.addresses import check_http_address
from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_command
from fleetbus_workers.environment.adapters.mcp.connection import Connection
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.adapters.mcp.http_connection import http_connection
from fleetbus_workers.environment.adapters.mcp.merged_connection import MergedConnection
from fleetbus_workers.environment.adapters.mcp.server_pool import PooledConnection, WarmPool

TOKEN_VARIABLE = "MCP_BEARER_TOKEN"
"""Environment variable: sent to every URL as ``Authorization: Bearer``. Specs are shown and stored: no place for a token."""

Make = Callable[[Callable[[Task], Connection]], McpEnvironment]
"""Makes an environment from a way to connect."""

Parts = tuple[Callable[[], McpEnvironment], Callable[[], AbstractAsyncContextManager[None]]]
"""What a factory is made of: one that makes environments, and what runs around them."""


def build_http_factory(spec: str, urls: str, make: Make, *, call_seconds: float) -> Parts:
    """Environments over the MCP servers at comma separated ``urls``. Raises `UserError` for what is no HTTP address."""
    addresses = split_urls(spec, urls)
    token = os.environ.get(TOKEN_VARIABLE, "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    host = ConnectionHost()

    def connect(_: Task) -> Connection:
        connections = {
            strip_credentials(url): http_connection(url, host, call_seconds=call_seconds, headers=headers) for url in addresses
        }
        return next(iter(connections.values())) if len(connections) == 1 else MergedConnection(connections)

    return lambda: make(connect), host.running


def split_urls(spec: str, urls: str) -> tuple[str, ...]:
    """The addresses in ``urls``, each once; a comma counts only before another address."""
    addresses = tuple(dict.fromkeys(url.strip() for url in re.split(r",(?=\s*https?://)", urls)))
    for url in addresses:
        check_http_address(spec, url, example="http:http://127.0.0.1:8000/mcp", secret=TOKEN_VARIABLE)
    return addresses


def build_pooled_factory(command: Sequence[str], reset_tool: str, make: Make, *, call_seconds: float) -> Parts:
    """Environments over processes that are reset with their tool ``reset_tool`` between episodes."""
    host = ConnectionHost()
    pool = WarmPool(
        lambda: ClientConnection(partial(open_command, command), host, call_seconds=call_seconds), reset_tool=reset_tool
    )
    return lambda: make(lambda task: PooledConnection(pool, task)), host.running
