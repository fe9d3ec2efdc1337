"""An OpenEnv server as all episodes of a worker share it: its addresses, its action schema, and the queue for a free session.

A server at its limit refuses instead of queueing. So the episodes of one worker wait in one queue: the first of them asks again
when a session of this worker ends, or after a pause that grows; the others wait behind it. The time limit of `open` ends
the wait. Above it is `environment`, below it one `OpenEnvSession` per episode.
"""

import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import structlog
from anyio.abc import TaskGroup

from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.openenv.client import AtCapacity, OpenEnvSession, open_session
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.serving.bounded_http import bound

TOKEN_VARIABLE = "OPENENV_TOKEN"
"""Sent as a bearer token, for servers behind a login."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 15.0
"""A session that is idle for so long is pinged, so that the server does not clean its environment up under it."""
SCHEMA_SECONDS = 30.0
MAX_SCHEMA_BYTES = 1 << 20

_log = structlog.get_logger(__name__)


class OpenEnvServer:
    """The server at ``url`` (http, https, ws or wss, with or without ``/ws``). Raises `UserError` if that is no URL."""

    def __init__(self, url: str, *, keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        self.socket_url, self.http_url = parse_addresses(url)
        self._keep_alive = keep_alive
        self._queue = anyio.Lock()
        self._slot_freed = anyio.Event()
        self._sessions: set[OpenEnvSession] = set()
        self._schema: dict[str, Any] | None = None
        self._schema_lock = anyio.Lock()

    async def open_session(self) -> OpenEnvSession:
        """A session; waits in a queue while the server is full. Raises what `client.open_session` raises."""
        if self._queue.statistics().locked:
            return await self._wait_in_queue()
        try:
            return await self._open_new()
        except AtCapacity:
            return await self._wait_in_queue()

    async def _wait_in_queue(self) -> OpenEnvSession:
        async with self._queue:
            pause = FIRST_PAUSE_SECONDS
            while True:
                freed = self._slot_freed
                try:
                    return await self._open_new()
                except AtCapacity as full:
                    _log.info("openenv server is full; waiting for a slot", server=self.http_url, reason=str(full))
                with anyio.move_on_after(pause * (0.5 + random.random())):
                    await freed.wait()
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _open_new(self) -> OpenEnvSession:
        session = await open_session(self.socket_url, headers=_build_headers())
        self._sessions.add(session)
        return session

    async def close_session(self, session: OpenEnvSession) -> None:
        self._sessions.discard(session)
        try:
            await session.close()
        finally:
            self._slot_freed.set()
            self._slot_freed = anyio.Event()

    async def fetch_action_schema(self) -> Mapping[str, object]:
        """The JSON Schema of the environment's action, asked for once. Raises `EnvironmentFailed`."""
        async with self._schema_lock:
            if self._schema is None:
                self._schema = await self._read_schema()
            return self._schema

    async def _read_schema(self) -> dict[str, object]:
        url = f"{self.http_url}/schema"
        try:
            hooks = bound(httpx, max_bytes=MAX_SCHEMA_BYTES)
            with anyio.fail_after(SCHEMA_SECONDS):
                async with httpx.AsyncClient(timeout=SCHEMA_SECONDS, headers=_build_headers(), event_hooks=hooks) as client:
                    answer = await client.get(url)
                    answer.raise_for_status()
            schema = answer.json()["action"]
        except (TimeoutError, RecursionError, httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EnvironmentFailed(f"cannot read the action schema at {url}: {error or type(error).__name__}") from error
        if not isinstance(schema, dict):
            raise EnvironmentFailed(f"the action schema at {url} is not an object")
        return schema

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ping_idle, tasks)
            yield
            tasks.cancel_scope.cancel()

    async def _ping_idle(self, tasks: TaskGroup) -> None:
        """A ping has no limit of its own: cutting it short would end the session of a server that is merely slow."""
        while True:
            await anyio.sleep(self._keep_alive / 2)
            now = anyio.current_time()
            for session in self._sessions:
                if not session.is_busy and now - session.last_used >= self._keep_alive / 2:
                    tasks.start_soon(session.ping)


def parse_addresses(url: str) -> tuple[str, str]:
    """The WebSocket URL and the HTTP base URL of a server. Raises `UserError`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{strip_credentials(url)!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https", "ws", "wss") or not host or parts.query or parts.fragment:
        raise UserError(
            f"{strip_credentials(url)!r} is not the address of an OpenEnv server, as in openenv:http://127.0.0.1:8000"
        )
    if parts.username or parts.password:
        raise UserError(f"the address of {host} must not hold a password: set a token in {TOKEN_VARIABLE}")
    secure = parts.scheme in ("https", "wss")
    place = f"[{host}]" if ":" in host else host
    base = f"{place}{f':{port}' if port else ''}{parts.path.rstrip('/').removesuffix('/ws')}"
    return f"{'wss' if secure else 'ws'}://{base}/ws", f"{'https' if secure else 'http'}://{base}"


def _build_headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}
