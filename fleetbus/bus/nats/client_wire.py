"""The wire by nats-py's public calls alone, for a nats-py whose private names are others, and for WebSocket.

Each connection is a client of its own, so that nothing of an old one is written to the next. One task takes the commands, which
have the form of the protocol, and makes a call of each; it is slower for that. Above it are the parts of the bus.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import BadSubscriptionError
from nats.errors import Error as NatsError

from fleetbus.bus.nats.nats_py import attach_transport
from fleetbus.bus.nats.protocol import header_fields, make_header_block
from fleetbus.bus.nats.websocket_transport import WebSocketTransport
from fleetbus.bus.nats.wire import CLOSE_LIMIT_SECONDS, Callback, ErrorCallback, Wire

TRY_SECONDS = 6.0
"""For one server to let a connection in. nats-py gives a WebSocket no limit of its own: what takes the connection and says
nothing would hold it for five minutes. Two servers fit into the time that the first connect has."""

TRIES = 1
"""More than the first, for a client to connect to its server; then the next one makes its own."""

log = logging.getLogger(__name__)


class ClientWire(Wire):
    """See `Wire`. Its task runs in ``tasks``."""

    def __init__(self, on_crash: Callable[[Exception], None], tasks: TaskGroup) -> None:
        super().__init__(on_crash)
        self._tasks = tasks
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._arrived = anyio.Event()
        self._lost = anyio.Event()
        self._subscriptions: dict[int, Subscription] = {}
        self._scope = anyio.CancelScope(shield=True)
        """Of the task, which has to send last words after the others were cancelled; `close` ends it."""
        self._is_closed = False
        self._has_given_up = False
        self._servers: list[str] = []
        self._options: dict[str, Any] = {}
        self._reconnects = True
        self._error_cb: ErrorCallback
        self._disconnected_cb: Callback
        self._reconnected_cb: Callback
        self._closed_cb: Callback

    @property
    def unwritten_bytes(self) -> int:
        return self._queued_bytes + int(self.client.pending_data_size)

    @property
    def _is_websocket(self) -> bool:
        return self._servers[0].startswith(("ws://", "wss://"))

    async def connect(
        self,
        servers: list[str],
        *,
        error_cb: ErrorCallback,
        disconnected_cb: Callback,
        reconnected_cb: Callback,
        closed_cb: Callback,
        allow_reconnect: bool = True,
        **options: Any,
    ) -> None:
        self._error_cb, self._disconnected_cb = error_cb, disconnected_cb
        self._reconnected_cb, self._closed_cb = reconnected_cb, closed_cb
        self._servers, self._options, self._reconnects = servers, options, allow_reconnect
        await self._open()
        self._tasks.start_soon(self._run, name="nats client")

    def send(self, command: bytes) -> None:
        self._queue.append(command)
        self._queued_bytes += len(command)
        self._arrived.set()

    async def force_reconnect(self) -> None:
        await self._leave()

    async def close(self) -> None:
        self._is_closed = True
        with anyio.move_on_after(CLOSE_LIMIT_SECONDS):
            while self.ready and self._queue:
                await anyio.lowlevel.checkpoint()  # the task that sends is beside this one
        await self._leave()
        self._scope.cancel()

    async def _leave(self) -> None:
        """Close the client; nats-py waits for a peer that does not read, this does not."""
        self._end()
        with anyio.move_on_after(CLOSE_LIMIT_SECONDS):
            try:
                await self.client.close()
            except (AssertionError, OSError, NatsError) as error:  # the first: nats-py, where it never chose a server
                log.debug("nats: connection failed during close; continuing: %s", error)
        self._lost.set()

    async def _open(self) -> None:
        """Connect until it succeeds, each try with a new client and, where there are several, the next server."""
        while True:
            self.client, self._lost = Client(), anyio.Event()
            self._servers = [*self._servers[1:], *self._servers[:1]]
            if self._is_websocket:
                attach_transport(self.client, WebSocketTransport())
            try:
                with anyio.fail_after(TRY_SECONDS):
                    await self.client.connect(
                        self._servers[-1:],
                        error_cb=self._hear_error,
                        closed_cb=self._hear_lost(self._lost),
                        allow_reconnect=False,
                        **self._options | {"max_reconnect_attempts": TRIES},
                    )
            except (OSError, NatsError, TimeoutError):
                if self._has_given_up or not self._reconnects:
                    raise
            else:
                break
            with anyio.move_on_after(CLOSE_LIMIT_SECONDS, shield=True):
                await self.client.close()
            await anyio.sleep(self._options["reconnect_time_wait"])
        if not self._is_websocket:  # those are known from outside by what was given alone
            found = [uri.geturl() for uri in self.client.discovered_servers]
            self._servers = list(dict.fromkeys([*self._servers, *found]))
        self._begin()

    async def _run(self) -> None:
        """Send what is queued; when the connection ends, make the next one."""
        with self._scope:
            while not self._is_closed:
                await self._send_until_lost()
                self._end()
                if (error := self.client.last_error) is not None:
                    await self._error_cb(error)
                await self._disconnected_cb()
                if not self._reconnects:
                    break
                await self._open()
                await self._reconnected_cb()
            await self._closed_cb()

    async def _send_until_lost(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_queued)
            await self._lost.wait()
            group.cancel_scope.cancel()

    async def _send_queued(self) -> None:
        while not self._lost.is_set():
            if not self._queue:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            command = self._queue.popleft() if self._queue else b""
            self._queued_bytes -= len(command)
            try:
                await self._call(command)
            except (OSError, NatsError) as error:
                log.debug("nats: a command failed: %s", error)
                if not self.client.is_connected:
                    return

    async def _call(self, command: bytes) -> None:
        line, _, rest = command.partition(b"\r\n")
        verb, *fields = line.decode().split(" ")
        if verb == "PUB":
            await self.client.publish(fields[0], rest[:-2], reply=fields[1])
        elif verb == "HPUB":
            size = int(fields[2])
            await self.client.publish(fields[0], rest[size:-2], reply=fields[1], headers=header_fields(rest[:size]))
        elif verb == "SUB":
            await self._subscribe(fields[0], int(fields[-1]))
        elif verb == "UNSUB" and (subscription := self._subscriptions.pop(int(fields[0]), None)) is not None:
            try:
                await subscription.drain()  # what is under way still arrives
            except BadSubscriptionError:
                log.debug("nats: subscription %s had ended", fields[0])

    async def _subscribe(self, subject: str, identifier: int) -> None:
        async def take(message: Msg) -> None:
            headers = make_header_block(message.headers) if message.headers else None
            self._dispatch(identifier, message.subject.encode(), message.reply.encode(), message.data, headers)

        self._subscriptions[identifier] = await self.client.subscribe(subject, cb=take)

    def _drop_outgoing(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self._subscriptions.clear()

    async def _hear_error(self, error: Exception) -> None:
        if type(error).__module__.startswith("aiohttp.") and not isinstance(error, OSError):  # a refused handshake
            error = ConnectionError(str(error))
        try:
            await self._error_cb(error)
        except BaseException:
            self._has_given_up = True
            raise

    def _hear_lost(self, lost: anyio.Event) -> Callback:
        async def hear() -> None:
            lost.set()

        return hear
