"""Names of durable consumers on servers with accounts: stored by the admin in the lanes of the role that works from each.

No other role reads there, and who knows a consumer's name can take from it (`fleetbus.auth.consumer_names`). So the server's
configuration does not list them, and its size is that of a few subjects however many lanes there are
(docs/decisions/0202-a-configuration-of-bounded-size.md). Above it is the bus; below it direct gets and the publisher.
"""

from __future__ import annotations

import anyio

from fleetbus.bus.nats.api import CONSUMER_NOT_FOUND, ApiRefused
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.direct import get_last
from fleetbus.bus.nats.publisher import Publisher
from fleetbus.bus.streams import RunPlan, lane_stream, log_stream, name_subject, work_alias
from fleetbus.concurrency.task_groups import open_first_error_task_group

PAUSES_SECONDS = (0.05, 0.25, 1.0)
"""A replica that lags may not have yet what the admin stored a moment ago."""

STORED_AT_ONCE = 64
STORE_SECONDS = 30.0


class ConsumerNames:
    """Finds what the server calls the durable consumers of a run. ``user`` has an account that imports; empty: plain names."""

    def __init__(self, connection: Connection, run: str, user: str) -> None:
        self._connection = connection
        self._run = run
        self._user = user
        self._known: dict[str, str] = {}

    async def find(self, consumer: str) -> tuple[str, str]:
        """The stream and the name by which the server is asked about a consumer; raises `ApiRefused` if none is declared, and
        `RequestUnanswered`."""
        if not self._user:
            return log_stream(self._run), consumer
        role, subject = name_subject(self._run, consumer)
        if role != self._user:
            return work_alias(self._run), consumer
        if consumer not in self._known:
            self._known[consumer] = await self._read(consumer, subject)
        return log_stream(self._run), self._known[consumer]

    async def _read(self, consumer: str, subject: str) -> str:
        for pause in (*PAUSES_SECONDS, 0.0):
            stored = await get_last(self._connection, lane_stream(self._run), subject)
            if stored is not None:
                return stored.payload.decode()
            await anyio.sleep(pause)
        raise ApiRefused(subject, CONSUMER_NOT_FOUND, f"no name of consumer {consumer} is stored")


async def store_names(publisher: Publisher, plan: RunPlan, on_server: RunPlan) -> None:
    """Store what the consumers of ``plan`` are called ``on_server``, a few at a time."""
    room = anyio.Semaphore(STORED_AT_ONCE)

    async def store(plain: str, name: str) -> None:
        async with room:
            subject = name_subject(plan.run, plain)[1]
            await publisher.publish(subject, name.encode(), message_id=None, expected_last=None, timeout=STORE_SECONDS)

    async with open_first_error_task_group() as tasks:
        for plain, named in zip(plan.consumers, on_server.consumers, strict=True):
            tasks.start_soon(store, plain.name, named.name)
