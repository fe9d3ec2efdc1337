"""The state of a nats-server in one process: streams, consumers, subscriptions and who is connected.

Above it are the buses that `fleetbus.bus.memory` connects; below it streams and consumers. What an operator may do is `kill`
and `restart`. Time comes from anyio alone, nothing depends on hashes or addresses, and no task runs in the background.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory_calls import SubscriptionTable
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_consumer import REMEMBERED_ACKS, MemoryConsumer
from fleetbus.bus.memory_faults import Faults
from fleetbus.bus.memory_stream import MemoryStream, StreamFiles
from fleetbus.bus.streams import MAX_CONSUMERS, ConsumerPlan, RunPlan, StreamPlan
from fleetbus.errors import BusError, UserError

EPOCH_NS = 1_700_000_000 * 1_000_000_000
"""Unix time of the instant that anyio's clock calls zero."""

Files = tuple[dict[str, StreamFiles], dict[tuple[str, str], list[int]]]
"""Of all streams what they stored; of all consumers what is not acked."""


class ServerState:
    """Streams, consumers, subscriptions and connections of all clients."""

    def __init__(self, *, epoch_ns: int = EPOCH_NS, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.subscriptions = SubscriptionTable()
        self._epoch_ns = epoch_ns
        self._alive = True
        self._streams: dict[str, MemoryStream] = {}
        self._consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self._links: dict[MemoryConnection, None] = {}

    def now_ns(self) -> int:
        """Unix nanoseconds: the fixed epoch plus anyio's clock."""
        return self._epoch_ns + int(anyio.current_time() * 1e9)

    def step_clock(self, seconds: float) -> None:
        """Set the server's clock forward, or back by a negative number of seconds."""
        self._epoch_ns += int(seconds * 1e9)
        for stream in self._streams.values():
            stream.last_before_set = stream.last_sequence

    def renew_consumers(self, stream: str, pick: int) -> None:
        """Every third consumer of a stream, from one that ``pick`` chooses, was lost and is declared anew: nothing is acked."""
        for consumer in self.consumers(stream)[pick % 3 :: 3]:
            consumer.begin_again()
            consumer.dispatch(anyio.current_time())

    def store_late(self, subject: str, payload: bytes, message_id: str, expected_last: int | None) -> None:
        """A message arrives whose sender has given it up; whether it is stored or refused nobody hears."""
        if self._alive:
            with suppress(BusError):
                self.stream_for(subject).store(subject, payload, message_id, expected_last, self.now_ns())

    def kill(self, *, forgotten_acks: int = REMEMBERED_ACKS) -> None:
        """As SIGKILL: nothing is answered until `restart`; each consumer forgets leases, counts and its last acks."""
        self._alive = False
        for link in list(self._links):
            link.change(server_up=False)
        for consumer in self._consumers.values():
            consumer.forget(forgotten_acks)

    def copy_files(self) -> Files:
        """Copy what a loss of power at this moment would leave of streams and consumers."""
        streams = {name: stream.copy_files() for name, stream in self._streams.items()}
        return streams, {key: consumer.list_unacked() for key, consumer in self._consumers.items()}

    def put_back(self, files: Files) -> None:
        """Hold what `copy_files` gave, while nothing is answered: what was acked since then is lost."""
        streams, consumers = files
        for name, stream in streams.items():
            self._streams[name].put_back(stream)
        for key, unacked in consumers.items():
            self._consumers[key].put_back(unacked)

    def restart(self) -> None:
        """Come up again with all that was stored; clients reconnect by themselves."""
        self._alive = True
        for link in list(self._links):
            link.change(server_up=True)

    def declare(self, plan: RunPlan) -> None:
        """See `fleetbus.bus.base.Bus.declare`."""
        for stream in (plan.log, plan.lanes):
            self._declare_stream(stream)
        for consumer in plan.consumers:
            self._declare_consumer(plan.log.name, consumer)

    def stream(self, name: str) -> MemoryStream:
        """The stream of that name; raises `BusError`."""
        if name not in self._streams:
            raise BusError(f"stream {name} does not exist: create the run first")
        return self._streams[name]

    def stream_for(self, subject: str) -> MemoryStream:
        """The stream that stores ``subject``; raises `BusError`."""
        for stream in self._streams.values():
            if stream.matches(subject):
                return stream
        raise BusError(f"{subject}: no stream stores this subject; create the run first (fleetbus init)")

    def consumer(self, stream: str, name: str) -> MemoryConsumer | None:
        return self._consumers.get((stream, name))

    def consumers(self, stream: str) -> list[MemoryConsumer]:
        """The consumers of that stream, by name."""
        return [consumer for (owner, _), consumer in sorted(self._consumers.items()) if owner == stream]

    def _declare_stream(self, plan: StreamPlan) -> None:
        found = self._streams.get(plan.name)
        if found is None:
            self._streams[plan.name] = MemoryStream(plan, created=str(self.now_ns()))
            return
        if found.plan.max_bytes and (not plan.max_bytes or plan.max_bytes > found.plan.max_bytes):
            found.plan = msgspec.structs.replace(found.plan, max_bytes=plan.max_bytes)
        _compare(f"stream {plan.name}", plan, found.plan)

    def _declare_consumer(self, stream: str, plan: ConsumerPlan) -> None:
        found = self._consumers.get((stream, plan.name))
        if found is not None:
            _compare(f"consumer {plan.name} of stream {stream}", plan, found.plan)
            return
        if len(self.consumers(stream)) >= (self._streams[stream].plan.max_consumers or MAX_CONSUMERS):
            raise UserError(f"stream {stream}: maximum consumers limit reached: declare fewer lanes")
        consumer = self._consumers[stream, plan.name] = MemoryConsumer(plan, self._streams[stream])

        def on_matching(entry: StreamEntry) -> None:
            consumer.add(entry.sequence)
            consumer.dispatch(anyio.current_time())

        self._streams[stream].on_matching.add(plan.filter, consumer, on_matching)


def _compare(what: str, wanted: msgspec.Struct, found: msgspec.Struct) -> None:
    for field in wanted.__struct_fields__:
        expected, actual = getattr(wanted, field), getattr(found, field)
        if expected != actual:
            raise UserError(f"{what} exists with {field} {actual!r} instead of {expected!r} and was left as it is")
