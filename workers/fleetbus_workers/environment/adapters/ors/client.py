"""Requests to a server of the Open Reward Standard, each with a deadline, repeated only where that cannot act twice.

A call is a stream of events whose first one names it (``task_id``): with that name the same run of the call is asked for again,
so a stream that breaks is resumed. A call that broke before its name came may have run, and is not sent again. See
docs/decisions/0260-calls-of-the-open-reward-standard-run-once.md. Above it is `server`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import anyio
import httpx

from fleetbus_workers.environment.adapters.ors.address import build_path, read_key
from fleetbus_workers.environment.adapters.ors.messages import (
    MAX_ANSWER_BYTES,
    BadAnswer,
    CallResult,
    decode_answer,
    read_detail,
    read_events,
)
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.serving.bounded_http import bound

CONNECT_SECONDS = 20.0
SILENT_SECONDS = 30.0
"""The longest silence within a stream: servers send a comment every ten seconds."""
KEPT_SECONDS = 2.0
"""Connections idle for longer are dropped before a server does that (5 s): a call on one would count as perhaps executed."""
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
IN_THREAD_BYTES = 64 << 10
"""Larger documents are decoded in a thread."""

MAY_PASS = frozenset({429, 502, 503, 504})
GONE = frozenset({404, 410})
FORGOTTEN = b"unknown task_id"
_SESSION_ID = re.compile("[!-~]{1,256}")
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

T = TypeVar("T")


class Unreachable(EnvironmentFailed):
    """No answer, or none in time. ``may_have_acted``: the request left."""

    def __init__(self, message: str, *, may_have_acted: bool = False) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class Refused(EnvironmentFailed):
    """An answer with a status that is an error. ``starting``: a proxy said that nothing ran, and that something may soon."""

    def __init__(self, message: str, status: int, *, starting: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.starting = starting


class SessionGone(EnvironmentFailed):
    """The server does not know the session: it was restarted, or the session expired."""


class ToolRaised(EnvironmentFailed):
    """The environment's own code raised."""


class Unsendable(ValueError):
    """Arguments of the policy's that are no JSON."""


class OrsClient:
    """The connections of one worker to the server at ``url``; `run` is entered around all requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._key = read_key()
        self._http: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEPT_SECONDS)
        hooks = bound(httpx, max_bytes=MAX_ANSWER_BYTES)
        headers = {"X-API-Key": self._key} if self._key else {}
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # none: they would be those of all episodes
        async with httpx.AsyncClient(headers=headers, limits=limits, event_hooks=hooks, cookies=cookies) as self._http:
            yield

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        sid: str = "",
        body: Mapping[str, Any] | None = None,
        seconds: float = 60.0,
        tries: int = TRIES,
    ) -> T:
        """The answer to a request that may be repeated, as ``kind``; within ``seconds``, pauses included.

        Raises `Unreachable`, `Refused`, `SessionGone` or `BadAnswer`.
        """
        failures = 0
        reason: EnvironmentFailed | None = None
        with anyio.move_on_after(seconds):
            while True:
                try:
                    async with self._stream(method, path, sid, body, seconds) as answer:
                        return await self._decode(await answer.aread(), kind)
                except (Unreachable, Refused) as error:
                    failures, reason = failures + 1, error
                    if isinstance(error, Refused) and error.status not in MAY_PASS:
                        raise
                    if failures >= tries and not (isinstance(error, Refused) and error.starting):
                        raise
                await _pause(failures)
        late = Unreachable(f"{self.url}{path}: no answer within {seconds:g} s", may_have_acted=True)
        raise reason or late

    async def create_session(self) -> str:
        """A name for a session, which holds nothing yet; one whose answer got lost is simply another name."""
        failures = 0
        while True:
            try:
                with anyio.fail_after(SILENT_SECONDS):
                    sid = await self._read_session_id()
                if not _SESSION_ID.fullmatch(sid):
                    raise BadAnswer(f"{self.url} opened no session: it gave no id of up to 256 visible characters")
                return sid
            except (Unreachable, Refused, TimeoutError) as error:
                failures += 1
                if failures >= TRIES or (isinstance(error, Refused) and error.status not in MAY_PASS):
                    if isinstance(error, TimeoutError):
                        raise Unreachable(f"{self.url} opened no session within {SILENT_SECONDS:g} s") from error
                    raise
            await _pause(failures)

    async def _read_session_id(self) -> str:
        async with self._stream("POST", "/create_session", "", {}, SILENT_SECONDS) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                return str((await self._decode(await answer.aread(), dict[str, Any])).get("sid", ""))
            async for name, data in read_events(answer.aiter_raw()):
                if name == "task_id":
                    return data.decode("latin-1").strip()
        raise BadAnswer(f"{self.url} opened no session: its answer ends without an id")

    async def call(self, sid: str, environment: str, name: str, arguments: Mapping[str, Any], seconds: float) -> CallResult:
        """Have a tool called, once; see the module. Raises an `EnvironmentFailed` for all that is no answer of the tool's, and
        `Unsendable` for arguments that never leave."""
        path = build_path(environment, "call")
        body: dict[str, Any] = {"name": name, "input": dict(arguments)}
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise Unsendable(str(error)) from error
        with anyio.move_on_after(seconds):
            failures = 0
            while True:
                try:
                    return await self._decode(await self._read_call(path, sid, body), CallResult)
                except (Unreachable, Refused) as error:
                    failures += 1
                    named = "task_id" in body
                    if isinstance(error, Refused):
                        again = error.starting or (named and error.status in MAY_PASS)
                    else:
                        again = named or not error.may_have_acted
                    if not again or (failures >= TRIES and not getattr(error, "starting", False)):
                        raise
                await _pause(failures)
        raise Unreachable(f"{self.url}: the call of {name!r} took longer than {seconds:g} s", may_have_acted=True)

    async def _read_call(self, path: str, sid: str, body: dict[str, Any]) -> bytes:
        """The result's JSON; ``body`` gets the name of the call once that is known."""
        parts: list[bytes] = []
        async with self._stream("POST", path, sid, body, SILENT_SECONDS) as answer:
            async for name, data in read_events(answer.aiter_raw()):
                if name == "task_id":
                    body["task_id"] = data[:256].decode("utf-8", "replace").strip()
                elif name in ("chunk", "end"):
                    parts.append(data)
                elif name == "error" and data == FORGOTTEN and "task_id" in body:
                    raise SessionGone("the server does not know the call any more: it was restarted, or too much time passed")
                elif name == "error":
                    raise ToolRaised(f"the environment raised: {clean_error(data.decode('utf-8', 'replace'))}")
                if name == "end":
                    return b"".join(parts)
        ending = "its answer is asked for again" if "task_id" in body else "it may have run, and is not sent again"
        raise Unreachable(f"{self.url}: the answer to a call broke off; {ending}", may_have_acted=True)

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, sid: str, body: Mapping[str, Any] | None, silent: float
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose status is 200; its body is read within."""
        assert self._http is not None, "the client is used outside of run"
        headers = {"X-Session-ID": sid} if sid else {}
        timeout = httpx.Timeout(silent, connect=CONNECT_SECONDS)
        request = self._http.build_request(method, self.url + path, headers=headers, json=body, timeout=timeout)
        try:
            answer = await self._http.send(request, stream=True)
            try:
                if answer.status_code != 200:
                    raise _build_refusal(f"{self.url}{path}", answer, await answer.aread(), sid)
                yield answer
            finally:
                with anyio.CancelScope(shield=True):
                    await answer.aclose()
        except _NOT_SENT as error:
            raise Unreachable(f"{self.url} cannot be reached: {_describe(error)}") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.url}{path} gave no answer: {_describe(error)}", may_have_acted=True) from error

    async def _decode(self, content: bytes, kind: type[T]) -> T:
        read = partial(decode_answer, content, kind, self._key)
        return await anyio.to_thread.run_sync(read) if len(content) > IN_THREAD_BYTES else read()


async def _pause(failures: int) -> None:
    await anyio.sleep(min(FIRST_PAUSE * 2 ** min(failures - 1, 16), LONGEST_PAUSE))


def _build_refusal(place: str, answer: httpx.Response, content: bytes, sid: str) -> EnvironmentFailed:
    detail = f"{place}: {answer.status_code} {read_detail(content)}".strip()
    if sid and answer.status_code in GONE:
        return SessionGone(f"the session is gone: {detail}")
    starting = answer.status_code == 503 and answer.headers.get("x-backend-state") == "starting"
    return Refused(detail, answer.status_code, starting=starting)


def _describe(error: Exception) -> str:
    return clean_error(str(error)) or type(error).__name__
