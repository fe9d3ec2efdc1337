"""One session on a server of the remote-gym protocol: multipart over HTTP, repeated only where that cannot act twice.

A request that never left, or that a server refused as busy, was not executed and is repeated. One whose answer got lost may
have been: it is repeated if the method only reads or resets, or if the server answers repetitions from memory (same body,
same boundary); a step is not. Above it is `remote_gym`; beside it `ServerPool` chooses the server.
"""

import random
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus_workers.environment.adapters.remote_gym.config import RemoteGymConfig
from fleetbus_workers.environment.adapters.remote_gym.connections import Connections, NoAnswer, NotConnected
from fleetbus_workers.environment.adapters.remote_gym.wire import (
    MAX_BODY_BYTES,
    DecodedResponse,
    WireError,
    build_request_headers,
    decode_response,
    encode_request,
)
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.serving.bounded_json import check_values

HEALTH_SECONDS = 5.0
IN_THREAD_BYTES = 64 << 10
"""Larger answers are taken apart in a thread."""

MAX_ID_CHARACTERS = 256
_SESSION_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARACTERS}}}")
"""It is kept in the journal of a session after each of its calls, before its server's address."""

_REPEATABLE = frozenset({"connect", "system_prompt", "reset", "close"})
_log = structlog.get_logger(__name__)


class RemoteGymError(EnvironmentFailed):
    """A server answered with an error, or not at all; the message says which."""


class ServerBusy(RemoteGymError):
    """Refused before anything was done: ask again later."""


class ServerUnreachable(RemoteGymError):
    """No answer. ``may_have_acted``: the request left."""

    def __init__(self, message: str, *, may_have_acted: bool) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class SessionGone(RemoteGymError):
    """The server does not know the session: it was restarted, or the session expired."""


class RequestRefused(RemoteGymError):
    """The server would refuse the same request again: not allowed, or not understood."""


class RemoteEnvironmentError(RemoteGymError):
    """The environment raised, or its answer could not be sent; the server does not tell these apart."""


class ServerPool:
    """The connections and the load of all sessions of one worker; enter `run` around them."""

    def __init__(self, *, draw: Callable[[], float] = random.random) -> None:
        self.draw = draw
        self.connections = Connections(max_bytes=MAX_BODY_BYTES)
        self._sessions: dict[str, int] = {}
        self._failed_at: dict[str, float] = {}
        self.idempotent: dict[str, bool] = {}
        self.busy_queues: defaultdict[tuple[str, ...], anyio.Lock] = defaultdict(anyio.Lock)
        """Where episodes of the same servers wait while all of these are busy: only the first asks again."""
        self.freed = anyio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self.connections.run():
            yield

    def choose(self, urls: Sequence[str]) -> str:
        """The server with the fewest sessions of ours, any of those; one that failed lately only if all did."""
        now = anyio.current_time()
        return min(urls, key=lambda url: (self._failed_at.get(url, -60.0) > now - 30.0, self.sessions(url), self.draw()))

    def sessions(self, url: str) -> int:
        return self._sessions.get(url, 0)

    def count(self, url: str, change: int) -> None:
        self._sessions[url] = self.sessions(url) + change
        if change < 0:
            self.freed.set()
            self.freed = anyio.Event()

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until one of our sessions ends."""
        with anyio.move_on_after(seconds):
            await self.freed.wait()

    def mark_failed(self, url: str) -> None:
        self._failed_at[url] = anyio.current_time()

    def mark_working(self, url: str) -> None:
        self._failed_at.pop(url, None)

    async def is_idempotent(self, url: str) -> bool:
        """True if the server says at ``/health`` that it answers repetitions from memory; asked once per server."""
        if url not in self.idempotent:
            try:
                answer = await self.connections.ask("GET", f"{url}/health", {}, timeout=HEALTH_SECONDS)
            except (NotConnected, NoAnswer):
                return False
            self.idempotent[url] = _says_idempotent(answer.content)  # what says nothing of it is not asked before every step
        return self.idempotent[url]


class RemoteGymSession:
    """One environment on one server. `close` may be repeated, and is all that may follow a failed call."""

    def __init__(self, pool: ServerPool, config: RemoteGymConfig, url: str, session_id: str) -> None:
        self._pool = pool
        self._config = config
        self.id = session_id
        self._open = True
        self._turn = anyio.Lock()
        self.url = url
        pool.count(url, 1)

    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> DecodedResponse:
        """``system_prompt``, ``reset`` or ``step``; raises a `RemoteGymError`."""
        if not self._open:
            raise SessionGone("the session is closed")
        fields = {"session_id": self.id, "method": method, "params": params or {}}
        async with self._turn:
            safe = method in _REPEATABLE or self._config.idempotent or await self._pool.is_idempotent(self.url)
            return await _call_with_retries(self._pool, self._config, [self.url], "call", method, fields, safe=safe)

    async def close(self) -> None:
        """Give the session back; one that is gone already, and a server that is, need nothing."""
        if not self._open:
            return
        self._open = False
        self._pool.count(self.url, -1)
        fields = {"session_id": self.id, "method": "close", "params": {}}
        try:
            await _call_with_retries(self._pool, self._config, [self.url], "call", "close", fields, safe=True)
        except SessionGone:
            pass
        except RemoteGymError as error:
            _log.warning("remote gym session close failed; leaving it to expire", server=self.url, reason=str(error))


async def connect(
    pool: ServerPool, config: RemoteGymConfig, env_config: Mapping[str, Any], seed: int
) -> tuple[RemoteGymSession, DecodedResponse]:
    """A session on the least loaded server that answers, begun with ``seed``; waits while all are busy.

    A connection whose answer got lost is made again: the first is at worst an unused session that expires.
    """
    fields = {"env_config": dict(env_config), "seed": seed}
    chosen: list[str] = []
    ask = partial(_call_with_retries, pool, config, config.base_urls, "connect", "connect", fields, safe=True, chosen=chosen)
    answer = None
    busy_queue = pool.busy_queues[config.base_urls]
    if not busy_queue.statistics().locked:
        with suppress(ServerBusy):
            answer = await ask(waits_while_busy=False)
    if answer is None:
        async with busy_queue:
            answer = await ask()
    session_id = answer.fields.get("session_id")
    if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
        raise RemoteEnvironmentError(
            f"{chosen[-1]} opened no session: its answer has no session_id of up to {MAX_ID_CHARACTERS} visible characters"
        )
    return RemoteGymSession(pool, config, chosen[-1], session_id), answer


async def _call_with_retries(
    pool: ServerPool,
    config: RemoteGymConfig,
    urls: Sequence[str],
    path: str,
    method: str,
    fields: Mapping[str, object],
    *,
    safe: bool,
    chosen: list[str] | None = None,
    waits_while_busy: bool = True,
) -> DecodedResponse:
    """One logical call with its repetitions: same bytes, same boundary. ``chosen`` gets the server of each try.

    Unless ``waits_while_busy``, it raises `ServerBusy` once every server has said that.
    """
    boundary = f"gym_env_{uuid.uuid4().hex}"
    try:
        body = encode_request(fields, boundary)
    except (ValueError, TypeError) as error:
        raise RequestRefused(f"the {method} cannot be sent: {error}") from error
    failures = busy_answers = consecutive = 0
    reason: RemoteGymError
    url = pool.choose(urls)
    while True:
        if chosen is not None:
            chosen.append(url)
        try:
            answer = await _post(pool, config, f"{url}/{path}", body, boundary)
        except ServerBusy as busy:
            busy_answers, reason = busy_answers + 1, busy
            if not waits_while_busy and busy_answers >= len(urls):
                raise
            url = pool.choose([each for each in urls if each != url] or urls)
        except ServerUnreachable as unreachable:
            pool.mark_failed(url)
            failures, consecutive, reason = failures + 1, consecutive + 1, unreachable
            if (unreachable.may_have_acted and not safe) or failures > config.retries:
                raise
            if consecutive >= config.failover_after_failures and len(urls) > 1:
                url, consecutive = pool.choose([each for each in urls if each != url]), 0
        else:
            pool.mark_working(url)
            return answer
        if config.log_retries:
            _log.info("remote gym call failed; retrying", method=method, server=url, reason=str(reason))
        if failures >= len(urls) or busy_answers:
            await pool.pause(config.pause(max(failures, busy_answers), pool.draw))


async def _post(pool: ServerPool, config: RemoteGymConfig, url: str, body: bytes, boundary: str) -> DecodedResponse:
    headers = build_request_headers(boundary)
    if config.token:
        headers["X-API-Key"] = config.token
    try:
        answer = await pool.connections.ask("POST", url, headers, body=body, timeout=config.timeout)
    except NotConnected as error:
        raise ServerUnreachable(f"{url} cannot be reached: {error}", may_have_acted=False) from error
    except NoAnswer as error:
        raise ServerUnreachable(f"{url} gave no answer: {error}", may_have_acted=True) from error
    except ValueError as error:
        raise RequestRefused(f"{url}: the request cannot be sent: {error}") from error
    if answer.status == 200:
        read = partial(decode_response, answer.content_type, answer.content)
        try:
            return await anyio.to_thread.run_sync(read) if len(answer.content) > IN_THREAD_BYTES else read()
        except WireError as error:
            raise RemoteEnvironmentError(f"{url}: {error}") from error
    raise _build_error(url, answer.status, answer.content)


def _says_idempotent(content: bytes) -> bool:
    try:
        check_values(content)
        said = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("idempotent") is True


def _build_error(url: str, status: int, content: bytes) -> RemoteGymError:
    detail = clean_error(content.decode("utf-8", "replace").strip())[:500]
    kinds: dict[int, type[RemoteGymError]] = {503: ServerBusy, 404: SessionGone, 500: RemoteEnvironmentError}
    if status in (502, 504):
        return ServerUnreachable(f"{url}: {status} {detail}", may_have_acted=True)
    return kinds.get(status, RequestRefused)(f"{url}: {status} {detail}")
