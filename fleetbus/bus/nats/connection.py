"""One supervised connection: opened with a time limit, watched, reconnected, and closed for good when the worker leaves.

nats-py's callbacks only set events; a task of the connection's own group waits for them, so that all that happens there
ends up in the host task. Above it are the parts of the bus; below it the wire.
"""

from __future__ import annotations

import logging
import math
import random
import re
import secrets
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from nats.errors import Error as NatsError

from fleetbus.bus.nats.api import JetStreamApi
from fleetbus.bus.nats.choose_wire import connect_wire
from fleetbus.bus.nats.local_key import read_local_key
from fleetbus.bus.nats.own_key import read_own_key, read_seed
from fleetbus.bus.nats.protocol import publish_command
from fleetbus.bus.nats.request_mux import RequestMux
from fleetbus.bus.nats.server_context import describe_missing_context
from fleetbus.bus.nats.socket_transport import TlsMissing
from fleetbus.bus.nats.websocket_transport import describe_proxy
from fleetbus.bus.nats.wire import Wire
from fleetbus.bus.streams import API
from fleetbus.concurrency.task_groups import open_flat_task_group
from fleetbus.config.load import strip_credentials
from fleetbus.errors import BusClosed, NotPermitted, UserError
from fleetbus_schemas import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 3.0
"""How long the first connect retries when no server listens, in seconds."""

GREETING_LIMIT_SECONDS = 10.0
"""How long it waits for a server that accepts the connection and is slow to send INFO. A server that speaks TLS alone greets a
client in the clear
only after `fleetbus.auth.server_config.GREETING_SECONDS`."""

WATCH_EVERY_SECONDS = 2.0
ROUND_TRIP_LIMITS_SECONDS = (2.5, 0.5)

PING_EVERY_SECONDS = 5
"""nats-py's own watch, which leaves a silent server after three of these."""

CLOSE_LIMIT_SECONDS = 2.0
HEADER_BYTES = 1024
"""More than the headers of any message."""

MINIMUM_VERSION = (2, 11)
MINIMUM_PAYLOAD_BYTES = MAX_MESSAGE_BYTES + HEADER_BYTES
_RECONNECT_WAIT_SECONDS = (0.15, 0.35)
_CREDENTIALS = frozenset({"nkeys_seed", "user_jwt_cb", "tls", "user", "token"})
"""Options by which a caller says who it is: no key is looked up then."""

_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"")


class Connection:
    """The connection that the parts of the bus share. ``on_reconnect`` are called in order after every reconnect."""

    def __init__(self, tasks: TaskGroup, inbox_prefix: str, name: str, api_prefix: str) -> None:
        self.tasks = tasks
        self._name = name
        self._api_prefix = api_prefix
        self._user = inbox_prefix.removeprefix("_INBOX_")
        self.inbox = f"{inbox_prefix}.{secrets.token_hex(8)}"
        self.wire: Wire
        self.has_wire = False
        self.own_key = ""
        """The public key that the server knows this connection by."""
        self.on_reconnect: dict[object, Callable[[], None]] = {}
        self.reader_names: tuple[str, ...] = ()
        """The names that consumers of readers have to have, one each; none: any that cannot be guessed."""
        self.on_lost: dict[object, Callable[[str], None]] = {}
        """Called with words about an entry that the server had acked and has lost."""

        self._events = anyio.Event()
        self._reconnected = False
        self._closed = False
        self._refused: Exception | None = None
        self._crash: Exception | None = None
        self._forbidden: Exception | None = None
        self._inboxes = 0
        self._opening, self._began = True, anyio.current_time()
        self.first_error: Exception | None = None
        self.is_checked = False
        """Connected, to a server that will do."""
        self.open = False
        self.answered_at = -math.inf
        """The event loop's time of the last round trip; the watch makes one every two seconds."""
        self.request_mux: RequestMux
        self.api: JetStreamApi

    def report_lost(self, subject: str, sequence: int) -> None:
        """The server gives the position of an entry again that it has acked to this connection."""
        log.warning("nats: the server lost entry %d on %s, which it had acked", sequence, subject)
        for hear in list(self.on_lost.values()):
            hear(f"entry {sequence} was stored on {subject}, and its position was given to another one")

    def set_wire(self, wire: Wire) -> None:
        self.wire, self.has_wire = wire, True

    def start(self) -> None:
        """Begin to answer and to watch; call it once the wire is connected."""
        self._opening, self.open = False, True
        self.request_mux = RequestMux(self.wire, self.inbox)
        self.api = JetStreamApi(self.request_mux, self._api_prefix)
        self.on_reconnect[self.request_mux] = self.request_mux.resend_all
        self.tasks.start_soon(self._supervise, name="nats supervisor")
        self.tasks.start_soon(self._watch, name="nats watchdog")

    def new_inbox(self) -> str:
        """A unique subject that no `RequestMux` listens to."""
        self._inboxes += 1
        return f"{self.inbox}-{self._inboxes:x}"

    async def round_trip(self, timeout: float) -> None:
        """Wait until the server has processed everything sent before; raises `TimeoutError`."""
        reply = self.request_mux.new_reply()
        await self.request_mux.ask(reply, publish_command(reply, "", b""), timeout=timeout)

    # What nats-py calls; each only takes note.

    async def on_error(self, error: Exception) -> None:
        text = str(error).lower()
        if violation := _VIOLATION.search(text):
            self._on_forbidden(violation[1], violation[2])
            return
        log.debug("nats: %s", error or type(error))
        if "authorization violation" in text:
            self._refused = error
            self._events.set()
            if self._opening:
                raise UserError("the NATS server refused the credentials: check the key or the user") from error
        if self.first_error is None or isinstance(error, ssl.SSLError):
            self.first_error = error
        late = anyio.current_time() > self._began + CONNECT_TIMEOUT_SECONDS
        if self._opening and (isinstance(error, ssl.SSLError) or (late and not isinstance(error, TimeoutError))):
            raise error

    async def on_disconnected(self) -> None:
        log.debug("nats: connection lost; reconnecting")

    async def on_reconnected(self) -> None:
        self._reconnected = True
        self._events.set()

    async def on_closed(self) -> None:
        self._closed = self.open
        self._events.set()

    def on_crash(self, error: Exception) -> None:
        self._crash = error
        self._events.set()

    def _on_forbidden(self, what: str, subject: str) -> None:
        """The server does not answer on a forbidden subject: the waiting request fails; without one, the worker ends."""
        verb = "publish" if what == "publish" else "subscribe"

        def error(spelled: str) -> NotPermitted:
            return NotPermitted(
                f"{self._name}: the NATS server does not let the user {self._user} {verb} to {spelled}: "
                "give the key of another user, or write the server's configuration again (fleetbus auth init)"
            )

        if not (self.open and verb == "publish" and self.request_mux.fail_forbidden(subject, error)):
            self._forbidden = error(subject)
            self._events.set()

    async def _supervise(self) -> None:
        while True:
            await self._events.wait()
            self._events = anyio.Event()
            if self._crash is not None:
                raise self._crash
            if self._forbidden is not None:
                raise self._forbidden
            if self._refused is not None:
                raise BusClosed("the NATS server refuses the credentials") from self._refused
            if self._closed:
                raise BusClosed("the connection to the NATS server is closed for good")
            if self._reconnected:
                self._reconnected = False
                log.info("nats: reconnected")
                for restore in list(self.on_reconnect.values()):
                    restore()

    async def _watch(self) -> None:
        """Cut a connection that claims to be up and brings nothing back."""
        while True:
            await anyio.sleep(WATCH_EVERY_SECONDS)
            if self.wire.ready and not await self._is_alive():
                log.warning("nats: no answer from the server for %g s; reconnecting", sum(ROUND_TRIP_LIMITS_SECONDS))
                await self.wire.force_reconnect()

    async def _is_alive(self) -> bool:
        # A time limit can run out while this process was blocked and the answer lies unread; the second trip decides.
        for limit in ROUND_TRIP_LIMITS_SECONDS:
            try:
                await self.round_trip(limit)
            except TimeoutError:
                continue
            self.answered_at = anyio.current_time()
            return True
        return not self.wire.ready

    async def close(self) -> None:
        """Give what was sent last a moment to arrive, then close; bounded, and not to be cancelled."""
        self.open = False
        with anyio.CancelScope(shield=True):
            if self.wire.ready:
                with suppress(TimeoutError):
                    await self.round_trip(CLOSE_LIMIT_SECONDS / 2)
            self.request_mux.close()
            await self.wire.close()


@asynccontextmanager
async def open_connection(
    url: str, *, name: str, inbox_prefix: str, api_prefix: str = API, reconnect: bool, options: dict[str, object]
) -> AsyncGenerator[Connection]:
    """A connection for the length of the block; raises `UserError` if no server answers, `BusClosed` if it is lost for good.

    ``url`` may list several servers, separated by commas; ``options`` are nats-py's own (keys, TLS).
    """
    async with open_flat_task_group() as tasks:
        connection = Connection(tasks, inbox_prefix, name, api_prefix)
        await _connect(connection, url, name=name, inbox_prefix=inbox_prefix, allow_reconnect=reconnect, **options)
        connection.start()
        try:
            yield connection
        finally:
            tasks.cancel_scope.cancel()
            await connection.close()


async def _connect(connection: Connection, url: str, **options: object) -> None:
    try:
        with anyio.fail_after(max(CONNECT_TIMEOUT_SECONDS, GREETING_LIMIT_SECONDS)):
            if not _CREDENTIALS & options.keys():
                wait_until = anyio.current_time() + CONNECT_TIMEOUT_SECONDS
                options["nkeys_seed_str"] = await read_local_key(url, give_up_at=wait_until) or None
            if isinstance(file := options.pop("nkeys_seed", None), str):
                # nats-py reads a file again whenever it reconnects; one that is gone would let it try for ever.
                options["nkeys_seed_str"] = read_seed(Path(file))
            await connect_wire(
                url,
                connection.tasks,
                connection.on_crash,
                connection.set_wire,
                error_cb=connection.on_error,
                disconnected_cb=connection.on_disconnected,
                reconnected_cb=connection.on_reconnected,
                closed_cb=connection.on_closed,
                connect_timeout=5,
                reconnect_time_wait=random.uniform(*_RECONNECT_WAIT_SECONDS),
                max_reconnect_attempts=-1,
                ping_interval=PING_EVERY_SECONDS,
                max_outstanding_pings=2,
                **options,
            )
        _check_server(connection.wire, url)
        connection.own_key = read_own_key(options)
        connection.is_checked = True
    except (TimeoutError, OSError, NatsError, UnicodeError) as error:  # the last one: what can be no host
        reason = connection.first_error or error
        if isinstance(reason, ssl.SSLError):
            raise UserError(_describe_tls_error(strip_credentials(url), reason, has_authority="tls" in options)) from error
        place = f"{strip_credentials(url)}{describe_proxy(url)}"
        raise UserError(
            f"no NATS server answers at {place}: start one, or check --nats{describe_missing_context(url)}"
        ) from reason
    except (ValueError, TypeError, AttributeError) as error:  # nats-py's, about a greeting that is no INFO or has odd fields
        raise UserError(_describe_stranger(url)) from error
    finally:
        if connection.has_wire and not connection.is_checked:
            with anyio.CancelScope(shield=True):
                await connection.wire.close()


def _check_server(wire: Wire, url: str) -> None:
    version = wire.server_version
    if not isinstance(wire.max_payload, int):
        raise UserError(_describe_stranger(url))
    if version < MINIMUM_VERSION:
        raise UserError(f"the NATS server at {strip_credentials(url)} is older than 2.11: upgrade it")
    if wire.max_payload < MINIMUM_PAYLOAD_BYTES:  # long episodes alone would be lost, and training would never see them
        limit = f"takes {wire.max_payload} bytes per message, and long turns need {MINIMUM_PAYLOAD_BYTES}"
        raise UserError(f"the NATS server at {strip_credentials(url)} {limit}: raise its max_payload")


def _describe_stranger(url: str) -> str:
    return f"what answers at {strip_credentials(url)} is no NATS server: check --nats"


def _describe_tls_error(url: str, reason: ssl.SSLError, *, has_authority: bool) -> str:
    if isinstance(reason, TlsMissing):
        return f"the NATS server at {url} offers no TLS, which tls:// asks for: write nats://, or check --nats"
    if not has_authority:
        known = "--nats-auth FOLDER with its certificate authority and your key, or a context with its ca"
        return f"the NATS server at {url} speaks TLS: give {known}"
    detail = reason.verify_message if isinstance(reason, ssl.SSLCertVerificationError) else reason.reason or str(reason)
    return f"the NATS server at {url} is not the one that was expected ({detail}): check --nats, or ca.pem in --nats-auth"
