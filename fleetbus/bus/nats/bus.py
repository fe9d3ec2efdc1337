"""The bus over NATS: one object per worker that keeps the promises of `fleetbus.bus.base`, out of the parts beside it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any

import anyio
import msgspec

from fleetbus.bus.base import ConsumerFloor, Listener, LogState, PublishAck, Reader, RequestServer, StreamEntry, Subscription
from fleetbus.bus.nats import calls
from fleetbus.bus.nats.api import ApiRefused, StreamUnavailable
from fleetbus.bus.nats.clock import ServerClock
from fleetbus.bus.nats.connection import Connection, open_connection
from fleetbus.bus.nats.consumer_names import ConsumerNames, store_names
from fleetbus.bus.nats.credentials import sign_in
from fleetbus.bus.nats.declare import check_log, declare, find_erasing_limits
from fleetbus.bus.nats.direct import get_histories, get_last, get_last_of_each, get_next
from fleetbus.bus.nats.log_identity import LogIdentity
from fleetbus.bus.nats.objects import NatsObjectStore
from fleetbus.bus.nats.protocol import parse_time_ns
from fleetbus.bus.nats.publisher import Positions, Publisher
from fleetbus.bus.nats.pull_subscription import open_subscription
from fleetbus.bus.nats.reader import NAME_SECONDS, NoNameLeft, merge_entries, open_reader, scan_histories, split_filters
from fleetbus.bus.nats.retention_api import count_unacked, list_floors, list_subjects, purge, read_floor
from fleetbus.bus.nats.run_protocol import read_protocol
from fleetbus.bus.nats.runs import RunOnServer, list_runs, read_log_config, remove_run
from fleetbus.bus.nats.server_context import build_options, read_server_context
from fleetbus.bus.objects import ObjectStore
from fleetbus.bus.streams import API, IMPORTED_API, RunPlan, StreamPlan, lane_stream, log_stream
from fleetbus.config.load import strip_credentials
from fleetbus.errors import BusError, NotPermitted, RequestUnanswered, UserError
from fleetbus_schemas import Subjects
from fleetbus_schemas.channels import covers_log
from fleetbus_schemas.protocol import ProtocolVersion

log = logging.getLogger(__name__)

PlanOnServer = Callable[[RunPlan], RunPlan]

CLOCK_EVERY_SECONDS = 10.0
CLOCK_SAMPLES = 4
"""Measurements at the start and after a reconnect."""

CLOCK_LIMIT_SECONDS = 1.0

FIND_AGAIN_SECONDS = 0.5

LAG_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Before a replica of the log is asked again that answered with less than this connection knows to exist. After the
last one its answer counts: what was there may have been purged."""


class NatsBus:
    """See `fleetbus.bus.base.Bus`."""

    def __init__(
        self,
        connection: Connection,
        run: str,
        *,
        narrow: bool = False,
        imports_as: str = "",
        lists_consumers: bool = True,
        on_server: PlanOnServer | None = None,
    ) -> None:
        self._connection = connection
        self._narrow = narrow
        self._lists_consumers = lists_consumers
        self._on_server = on_server
        self._log = log_stream(run)
        self._imports = bool(imports_as)
        self._names = ConsumerNames(connection, run, imports_as)
        self._lanes = lane_stream(run)
        subjects = Subjects(run)
        self._log_prefix = subjects.log.removesuffix(">")
        self._lane_prefix = subjects.lanes.removesuffix(">")
        self._positions = Positions()
        self._publisher = Publisher(connection, self._positions)
        self._created = ""
        """When the log was made, as of the last answer about it."""
        self._clock = ServerClock()
        self._clock_due = anyio.Event()
        connection.on_reconnect[self] = self._reset_clock

    @property
    def storing_problem(self) -> str:
        return self._publisher.storing_problem

    @property
    def own_key(self) -> str:
        return self._connection.own_key

    def now_ns(self) -> int:
        return self._clock.now_ns()

    async def declare(self, plan: RunPlan) -> None:
        on_server = self._on_server(plan) if self._on_server is not None else plan
        await declare(self._connection.api, on_server)
        if self._on_server is not None:
            await store_names(self._publisher, plan, on_server)
        await self.measure_clock()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        return await self._publisher.publish(
            subject, payload, message_id=message_id, expected_last=expected_last, timeout=timeout
        )

    @asynccontextmanager
    async def pull(self, consumer: str, *, credits: int) -> AsyncGenerator[Subscription]:
        while True:
            try:
                found = await self._names.find(consumer)
                break
            except RequestUnanswered as unanswered:  # as a subscription does, it waits for the server as long as it may
                log.debug("nats: consumer %s cannot be found; retrying: %s", consumer, unanswered)
                await anyio.sleep(FIND_AGAIN_SECONDS)
        async with open_subscription(self._connection, *found, credits) as subscription:
            yield subscription

    def read(self, subjects: Sequence[str], *, start: int = 1) -> AbstractAsyncContextManager[Reader]:
        stream = self._stream_of(subjects)
        identity = LogIdentity(
            self._connection,
            stream,
            created=self._created if stream == self._log else "",
            looks_up=not self._narrow,
            get_last_stored=partial(self._publisher.get_last_stored, subjects[0]),
        )
        return open_reader(self._connection, stream, subjects, start, identity=identity)

    async def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
        stream = self._stream_of(subjects)
        info = await self._stream_info(stream)
        end, leader = info["state"]["last_seq"], (info.get("cluster") or {}).get("leader", "")
        if end < start:
            return
        give_up_at = anyio.current_time() + NAME_SECONDS
        while True:
            try:
                async with aclosing(self._scan_once(stream, subjects, start, end, leader, info["created"])) as entries:
                    async for entry in entries:
                        start, give_up_at = entry.sequence + 1, anyio.current_time() + NAME_SECONDS
                        yield entry
                return
            except NoNameLeft:
                if anyio.current_time() >= give_up_at:
                    raise
                await anyio.sleep(secrets.SystemRandom().uniform(0.1, 1.0))  # all of them, or none: others wait for them too

    async def _scan_once(
        self, stream: str, subjects: Sequence[str], start: int, end: int, leader: str, created: str
    ) -> AsyncGenerator[StreamEntry]:
        async with AsyncExitStack() as stack:
            opened = [
                open_reader(
                    self._connection,
                    stream,
                    filters,
                    start,
                    beside=leader,
                    identity=LogIdentity(self._connection, stream, created=created),
                    name_seconds=0.0,
                )
                for filters in split_filters(subjects)
            ]
            readers = [await stack.enter_async_context(each) for each in opened]
            async for entry in await stack.enter_async_context(aclosing(merge_entries(readers, end))):
                yield entry

    async def last(self, subject: str) -> StreamEntry | None:
        stream = self._stream_of((subject,))
        found = await get_last(self._connection, stream, subject)
        for pause in LAG_PAUSES_SECONDS:
            if not self._positions.is_behind((subject,), (found,) if found is not None else ()):
                break
            await anyio.sleep(pause)
            found = await get_last(self._connection, stream, subject)
        return found

    async def history(self, subjects: Sequence[str]) -> list[StreamEntry]:
        stream = self._stream_of(subjects)
        read = scan_histories if self._narrow else get_histories
        found = await read(self._connection, stream, subjects)
        for pause in LAG_PAUSES_SECONDS:
            if not self._positions.is_behind(subjects, found):
                break
            await anyio.sleep(pause)
            found = await read(self._connection, stream, subjects)
        return found

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        return await get_last_of_each(self._connection, self._stream_of(subjects), subjects)

    async def list_subjects(self, subject: str) -> list[str]:
        return await list_subjects(self._connection.api, self._log, subject)

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        info = await self._stream_info(self._log)
        state, config = info["state"], info["config"]
        may_ask = not self._imports  # the answer tells a consumer's name, which accounts keep secret
        counted = [await count_unacked(self._connection.api, self._log, name) for name in consumers if may_ask]
        return LogState(
            first_sequence=int(state["first_seq"]),
            last_sequence=int(state["last_seq"]),
            entries=int(state["messages"]),
            used_bytes=int(state["bytes"]),
            limit_bytes=max(int(config["max_bytes"]), 0),
            duplicate_window_seconds=float(config.get("duplicate_window", 0)) / 1e9,
            created=str(info["created"]),
            erasing=find_erasing_limits(info["config"]),
            begins=max(int(config.get("first_seq") or 1), 1),
            unacked=sum(counted),
        )

    async def check_log(self, *, reading: bool = False) -> None:
        """Raise `UserError` if there is no such run, or its log is none; not part of the `Bus` protocol."""
        plan = StreamPlan(name=self._log, subjects=(f"{self._log_prefix}>",))
        check_log(plan, await read_log_config(self._connection.api, self._log), reading=reading)

    async def run_protocol(self) -> ProtocolVersion:
        """The protocol of the run; not part of the `Bus` protocol either."""
        return read_protocol((await self._stream_info(self._log))["config"])

    async def runs(self) -> list[RunOnServer]:
        """All runs that the server keeps, this one and others; not part of the `Bus` protocol."""
        return await list_runs(self._connection.api)

    async def remove_run(self, run: str) -> None:
        """Remove all of a run: its log, its lanes, its weights. Not part of the `Bus` protocol either."""
        await remove_run(self._connection.api, run)

    async def ack_floors(self, consumers: Sequence[str] = ()) -> list[ConsumerFloor]:
        if not consumers:
            return await list_floors(self._connection.api, self._log)
        return [
            msgspec.structs.replace(await read_floor(self._connection.api, *await self._names.find(name)), name=name)
            for name in consumers
        ]

    async def next_entry(self, subject: str, *, start: int) -> StreamEntry | None:
        return await get_next(self._connection, self._log, subject, start)

    async def purge(self, subject: str, *, below: int) -> None:
        await purge(self._connection.api, self._log, subject, below)

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> bytes:
        if subject.startswith(f"{API}."):
            if not self._lists_consumers and ".CONSUMER.LIST." in subject:  # asked, the server would log it as a violation
                raise NotPermitted(f"{subject}: the names of consumers are a secret on a server with accounts")
            subject = self._connection.api.prefix + subject.removeprefix(API)
        return await calls.request(self._connection, subject, payload, timeout)

    def serve(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[RequestServer]:
        return calls.open_server(self._connection, subject, limit)

    async def broadcast(self, subject: str, payload: bytes) -> None:
        await calls.broadcast(self._connection, subject, payload)

    def listen(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[Listener]:
        return calls.open_listener(self._connection, subject, limit)

    def objects(self, bucket: str) -> ObjectStore:
        return NatsObjectStore(self._connection, self._publisher, bucket)

    async def run_clock(self) -> None:
        """Measure the server's clock now and then; runs beside the bus."""
        while True:
            with anyio.move_on_after(CLOCK_EVERY_SECONDS):
                await self._clock_due.wait()
            samples = CLOCK_SAMPLES if self._clock_due.is_set() else 1
            self._clock_due = anyio.Event()
            await self.measure_clock(samples)

    async def measure_clock(self, samples: int = CLOCK_SAMPLES) -> None:
        """Learn the server's time. Without a stream, or without an answer, what is known so far has to do."""
        for _ in range(samples):
            sent = time.monotonic_ns()
            try:
                answer = await self._connection.api.ask(f"STREAM.INFO.{self._log}", timeout=CLOCK_LIMIT_SECONDS)
            except (RequestUnanswered, ApiRefused) as error:
                log.debug("nats: server clock measurement failed; keeping the last offset: %s", error)
                return
            self._clock.learn(sent, time.monotonic_ns(), parse_time_ns(answer["ts"]))
            self._publisher.mark_stream_known(self._log_prefix)
            self._created = answer["created"]

    def _reset_clock(self) -> None:
        self._clock.forget()
        self._clock_due.set()

    async def _stream_info(self, stream: str) -> dict[str, Any]:
        return await self._connection.api.ask(f"STREAM.INFO.{stream}")

    def _stream_of(self, subjects: Sequence[str]) -> str:
        if all(subject.startswith(self._log_prefix) for subject in subjects):
            return self._log
        if all(subject.startswith(self._lane_prefix) for subject in subjects):
            return self._lanes
        run = self._log.removeprefix(log_stream(""))
        raise BusError(f"this is a connection of run {run}, no single stream of which stores {', '.join(subjects)}")


def inbox_prefix(role: str) -> str:
    """Prefix of the answers to a worker of this role. It needs to subscribe and to publish below it: its own round trips, by
    which a dead connection is noticed, are messages to itself."""
    return f"_INBOX_{role}"


@asynccontextmanager
async def connect(
    url: str,
    *,
    run: str,
    role: str = "worker",
    worker: str = "",
    reconnect: bool = True,
    nkey_seed: Path | None = None,
    credentials: Path | None = None,
    tls: SSLContext | None = None,
    user: str = "",
    narrow: bool = False,
    plan_on_server: PlanOnServer | None = None,
    readers: Sequence[str] = (),
) -> AsyncGenerator[NatsBus]:
    """A bus for the length of the block.

    ``url`` may list several servers, separated by commas, or be the name of a context of the nats command line
    (`fleetbus.bus.nats.server_context`); ``nkey_seed`` and ``credentials`` are files. With ``tls`` the
    handshake comes first, so that nothing is ever said in the clear. ``user`` has the rights to be used, on a server with
    accounts (default: a server without, and ``role``); ``narrow`` reads histories by filtered consumers, for users that must
    not read the whole log; ``plan_on_server`` says under which names an admin declares a plan; ``readers`` are the names that
    consumers of this user's have to have, where it has no choice. Raises `UserError` if no server answers within about 3 s,
    if it runs without JetStream or refuses the credentials, and in the block `NotPermitted` when the server forbids something,
    `BusClosed` when the connection is gone for good (with ``reconnect`` False: as soon as it is lost).
    """
    options: dict[str, Any] = {}
    if (context := read_server_context(url)) is not None:
        options = build_options(url, context, identified=not (nkey_seed is None and credentials is None))
        url = context.url
    if nkey_seed is not None:
        options["nkeys_seed"] = str(nkey_seed)
    if credentials is not None:
        options |= sign_in(credentials)
    if tls is not None:
        options |= {"tls": tls, "tls_handshake_first": True}
    name = f"fleetbus {run} {role} {worker}".strip()
    imports = user not in ("", "admin")  # the admin is in the account that holds the streams
    lists_consumers = not imports or covers_log(user, "floors")
    async with open_connection(
        url,
        name=name,
        inbox_prefix=inbox_prefix(user or role),
        api_prefix=IMPORTED_API if imports else API,
        reconnect=reconnect,
        options=options,
    ) as connection:
        connection.reader_names = tuple(readers)
        bus = NatsBus(
            connection,
            run,
            narrow=narrow,
            imports_as=user if imports else "",
            lists_consumers=lists_consumers,
            on_server=plan_on_server,
        )
        try:
            await bus.measure_clock()
        except StreamUnavailable as error:  # a server with JetStream says of a stream that is not there that it is not there
            where = strip_credentials(url)
            reloaded = (
                "if a reload let this run in, reload once more (SIGHUP); a site's server may have lost its link to the run's"
            )
            remedy = reloaded if imports else "start it with `nats-server -js`"
            raise UserError(f"the NATS server at {where} runs without JetStream: {remedy}") from error
        connection.tasks.start_soon(bus.run_clock, name="nats clock")
        yield bus
