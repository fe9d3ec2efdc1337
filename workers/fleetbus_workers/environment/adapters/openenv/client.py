"""One session on an OpenEnv 0.10 server: JSON frames over the WebSocket ``/ws``, one request, one reply, in order.

Replies carry no id, so a socket is used by one call at a time, and never again after a call that was cut short. Nothing here
reconnects: the server would answer from a new environment that was never reset, and say nothing. Above it is `openenv`.
"""

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.serving.bounded_json import TooManyValues, check_values

CONNECT_SECONDS = 20.0
CLOSE_SECONDS = 5.0
PING_SECONDS = 20.0
"""Pings keep a socket open through proxies while the policy thinks; a late pong cuts nothing, each call has its own limit."""
MAX_FRAME_BYTES = 32 << 20


class OpenEnvError(EnvironmentFailed):
    """The server answered with an error; ``code`` is the protocol's."""

    code = ""


class InvalidJson(OpenEnvError):
    """The server could not read a frame."""

    code = "INVALID_JSON"


class UnknownType(OpenEnvError):
    """The server does not know this kind of frame: it speaks another version of the protocol."""

    code = "UNKNOWN_TYPE"


class ActionRefused(OpenEnvError):
    """Raised when what was sent does not fit the environment's schema; the session continues."""

    code = "VALIDATION_ERROR"


class ExecutionFailed(OpenEnvError):
    """The environment's own code raised; the session continues, in the state that this left."""

    code = "EXECUTION_ERROR"


class AtCapacity(OpenEnvError):
    """The server has as many sessions as it takes; the socket is closed."""

    code = "CAPACITY_REACHED"


class FactoryFailed(OpenEnvError):
    """The server could not make an environment; the socket is closed."""

    code = "FACTORY_ERROR"


class SessionFailed(OpenEnvError):
    """The server gave the session up; the socket is closed."""

    code = "SESSION_ERROR"


class ConnectionLost(EnvironmentFailed):
    """There is no session any more, or there never was one."""


_ERRORS: dict[str, type[OpenEnvError]] = {kind.code: kind for kind in OpenEnvError.__subclasses__()}


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a reset or a step. ``reward`` None: the environment said nothing (or NaN, which it sends as null)."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class _Frame(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


_frame = msgspec.json.Decoder(_Frame)
_UNREADABLE = (TooManyValues, *UNREADABLE)
"""What reading a frame raises. A ping is read in no episode: nothing but an `EnvironmentFailed` may come of it."""
_encoder = msgspec.json.Encoder()


class OpenEnvSession:
    """A session; made by `open_session`. Calls wait for each other; all of them raise `OpenEnvError` or `ConnectionLost`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._call_lock = anyio.Lock(fast_acquire=True)
        self._lost = ""
        self.last_used = anyio.current_time()

    @property
    def is_busy(self) -> bool:
        """True if a call is on its way."""
        return self._call_lock.statistics().locked

    async def reset(self, arguments: Mapping[str, Any]) -> StepResult:
        return _parse_result(await self._call("reset", "observation", arguments))

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        return _parse_result(await self._call("step", "observation", action))

    async def state(self) -> dict[str, Any]:
        return _parse_object(await self._call("state", "state"))

    async def mcp(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JSON-RPC request past `step`: no reward, no count. Gives the response, which may hold an ``error``."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        return _parse_object(await self._call("mcp", "mcp", request))

    async def _call(self, kind: str, expected: str, data: Mapping[str, Any] | None = None) -> msgspec.Raw:
        frame = _encoder.encode({"type": kind} if data is None else {"type": kind, "data": data}).decode()
        async with self._call_lock:
            if self._lost:
                raise ConnectionLost(f"the OpenEnv session is gone: {self._lost}")
            early = await self._read_early()
            text = await self._send_and_receive(frame) if early is None else early
            self.last_used = anyio.current_time()
        try:
            check_values(text)
            reply = _frame.decode(text)
        except _UNREADABLE as error:
            raise ConnectionLost(self._mark_lost(f"the server sent a malformed frame ({error})")) from error
        refusal = self._build_error(_parse_object(reply.data)) if reply.type == "error" else None
        if early is not None and not self._lost:
            raise ConnectionLost(
                self._mark_lost("the server replied to what it was not asked: replies cannot be matched to calls any more")
            )
        if refusal is not None:
            raise refusal
        if reply.type != expected:
            raise ConnectionLost(self._mark_lost(f"the server answered {kind} with {reply.type!r}"))
        return reply.data

    async def _read_early(self) -> str | bytes | None:
        """Read what came without being asked for: an error, as of a server that is full, or one reply too many."""
        try:
            with anyio.move_on_after(0):
                return await self._socket.recv()
        except ConnectionClosed:  # said by what is sent next
            pass
        return None

    async def _send_and_receive(self, frame: str) -> str | bytes:
        try:
            try:
                await self._socket.send(frame)
            except ConnectionClosed:  # what the server said before it closed is still to be read
                pass
            return await self._socket.recv()
        except ConnectionClosed as closed:
            raise ConnectionLost(f"the OpenEnv server dropped the session: {self._mark_lost(str(closed))}") from closed
        except BaseException:
            self._mark_lost("a call was cancelled, and its reply would be read as that of the next one's")
            self._socket.transport.abort()
            raise

    def _mark_lost(self, reason: str) -> str:
        self._lost = self._lost or reason
        return reason

    def _build_error(self, data: Mapping[str, object]) -> OpenEnvError:
        code = str(data.get("code", ""))
        kind = _ERRORS.get(code, SessionFailed)
        if kind in (AtCapacity, FactoryFailed, SessionFailed):
            self._mark_lost(f"{code}: {data.get('message')}")
        return kind(f"{code}: {data.get('message')}{_format_field_errors(data.get('errors'))}")

    async def ping(self) -> None:
        """Keep the session alive: the server removes sessions without calls, even if their socket is open.

        A method that no server has counts as a call and does nothing.
        """
        try:
            await self.mcp("ping")
        except (OpenEnvError, ConnectionLost):
            return

    async def close(self) -> None:
        """Send the close frame and close; a lost session is only closed."""
        if not self._lost:
            self._mark_lost("it was closed")
            try:
                await self._socket.send('{"type":"close"}')
            except ConnectionClosed:
                pass
        await self._socket.close()


class _Connect(connect):
    """Connects to the given address and nowhere else: a server that sends its clients away would send their keys along."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def open_session(url: str, *, headers: Mapping[str, str] | None = None) -> OpenEnvSession:
    """A new session at ``url`` (``ws://host:port/ws``). Raises `ConnectionLost`, `AtCapacity` or another `OpenEnvError`.

    A server at its limit accepts the connection and refuses only what follows, so a first call is part of opening.
    """
    try:
        socket = await _Connect(
            url,
            additional_headers=dict(headers or {}),
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=CONNECT_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=PING_SECONDS,
            ping_timeout=None,
        )
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise ConnectionLost(f"no connection to the OpenEnv server {url}: {str(error) or type(error).__name__}") from error
    session = OpenEnvSession(socket)
    try:
        await session.state()
    except ExecutionFailed:  # the environment has no state to show before its first reset
        pass
    except BaseException:
        socket.transport.abort()
        raise
    return session


def _parse_result(data: msgspec.Raw) -> StepResult:
    try:
        return msgspec.json.decode(data, type=_ResultPayload).to_result()
    except _UNREADABLE as error:
        raise SessionFailed(f"the server's observation cannot be read: {error}") from error


class _ResultPayload(msgspec.Struct, frozen=True):
    """An observation as servers send it: a reward may be a truth value, metadata may be null or absent."""

    observation: dict[str, Any] | None = None
    reward: bool | float | None = None
    done: bool | None = False
    metadata: dict[str, Any] | None = None

    def to_result(self) -> StepResult:
        reward = None if self.reward is None else float(self.reward)
        return StepResult(observation=self.observation or {}, reward=reward, done=bool(self.done), metadata=self.metadata or {})


def _parse_object(data: msgspec.Raw) -> dict[str, object]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except _UNREADABLE as error:
        raise SessionFailed(f"the server's reply cannot be read: {error}") from error


def _format_field_errors(errors: object) -> str:
    """The field errors of a refused action, as a policy can act on them."""
    if not isinstance(errors, list):
        return ""
    listed = [f"{_format_place(error.get('loc'))}: {error.get('msg')}" for error in errors if isinstance(error, Mapping)]
    return f" ({'; '.join(listed)})" if listed else ""


def _format_place(place: object) -> str:
    return ".".join(map(str, place)) if isinstance(place, list) else str(place or "")
