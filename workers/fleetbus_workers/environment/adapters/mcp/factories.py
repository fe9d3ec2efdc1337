"""Environments over MCP servers: objects in this process, processes of their own, or one or several URLs.

Above it is `specs`, which reads what a user writes; below it the connections.
"""

import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError
from fleetbus.user_code import load_callable
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.mcp.client import ClientConnection, ConnectionHost, open_command, open_server
from fleetbus_workers.environment.adapters.mcp.connection import Connection, DirectConnection, has_default_lifespan
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment, PromptStyle
from fleetbus_workers.environment.adapters.mcp.http_connection import http_connection
from fleetbus_workers.environment.adapters.mcp.merged_connection import MergedConnection
from fleetbus_workers.environment.adapters.mcp.server_pool import PooledConnection, WarmPool
from fleetbus_workers.environment.adapters.warehouse.server import serve_task
from fleetbus_workers.environment.task_permissions import check_http_address

TOKEN_VARIABLE = "MCP_BEARER_TOKEN"
"""Environment variable: sent to every URL as ``Authorization: Bearer``. Specs are shown and stored: no place for a token."""


def build_warehouse(context: AdapterContext) -> Factory:
    """The environment that ships, in this process."""
    return _build_in_process_factory(context, serve_task, "compact", replayable=True)


def build_object(context: AdapterContext) -> Factory:
    """Environments over the server object that a user's function makes for each task."""
    serve = load_callable(f"environment {context.spec!r}", context.rest)
    # A tool that raises is answered to the policy. The SDK logs a traceback of each as well, up to a second of its event loop.
    logging.getLogger("mcp.server").setLevel(logging.CRITICAL)
    return _build_in_process_factory(context, serve, "fleet", replayable=bool(getattr(serve, "replayable", False)))


def _build_in_process_factory(
    context: AdapterContext, serve: Callable[[Task], Any], style: PromptStyle, *, replayable: bool
) -> Factory:
    """Environments over server objects: called directly where that is possible, through a client otherwise."""
    host = ConnectionHost()
    listings: dict[Any, Any] = {}

    def connect(task: Task) -> Connection:
        server = serve(task)
        if has_default_lifespan(server):
            return DirectConnection(server, listings, call_seconds=context.call_seconds)
        return ClientConnection(partial(open_server, server), host, call_seconds=context.call_seconds)

    return Factory(partial(McpEnvironment, connect, replayable=replayable, **context.mcp_arguments(style)), host.run)


def build_http(context: AdapterContext) -> Factory:
    """Environments over the MCP servers at comma separated URLs, or a URL alone. Raises `UserError` for no HTTP address."""
    addresses = _split_urls(context.spec, context.spec if context.rest.startswith("//") else context.rest)
    token = os.environ.get(TOKEN_VARIABLE, "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    host = ConnectionHost()

    def connect(_: Task) -> Connection:
        connections = {
            strip_credentials(url): http_connection(
                url, host, call_seconds=context.call_seconds, headers=headers, key_variable=TOKEN_VARIABLE
            )
            for url in addresses
        }
        return next(iter(connections.values())) if len(connections) == 1 else MergedConnection(connections)

    return Factory(partial(McpEnvironment, connect, **context.mcp_arguments("fleet")), host.run)


def build_command(context: AdapterContext) -> Factory:
    """Environments over a process each, or over processes that are reset with a tool of theirs between episodes."""
    options = context.form.partition("+")[2]
    key, _, reset_tool = options.partition("=")
    if "+" in context.form and (key != "reset" or not reset_tool):
        raise UserError(
            f"environment {context.spec!r} must name the tool that resets its server, as in stdio+reset=new_game:COMMAND"
        )
    command = _split_command(context.spec, context.rest)
    host = ConnectionHost()

    def start_client() -> ClientConnection:
        return ClientConnection(partial(open_command, command), host, call_seconds=context.call_seconds)

    pool = WarmPool(start_client, reset_tool=reset_tool)

    def connect(task: Task) -> Connection:
        return PooledConnection(pool, task) if reset_tool else start_client()

    return Factory(partial(McpEnvironment, connect, **context.mcp_arguments("fleet")), host.run)


def _split_command(spec: str, command_line: str) -> Sequence[str]:
    try:
        command = shlex.split(command_line)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    if not command:
        raise UserError(f"environment {spec!r} names no command, as in stdio:python -m my_server")
    if shutil.which(command[0]) is None:
        raise UserError(f"environment {spec!r}: command {command[0]!r} not found; install it or give its path")
    return command


def _split_urls(spec: str, urls: str) -> tuple[str, ...]:
    """The addresses in ``urls``, each once; a comma counts only before another address."""
    addresses = tuple(dict.fromkeys(url.strip() for url in re.split(r",(?=\s*https?://)", urls)))
    for url in addresses:
        check_http_address(spec, url, example="http:http://127.0.0.1:8000/mcp", secret=TOKEN_VARIABLE)
    return addresses
