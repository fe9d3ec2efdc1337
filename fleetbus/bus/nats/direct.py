"""Direct gets: single entries and whole histories of literal subjects, without any consumer.

On a replicated stream any replica may answer, so an entry that was acked a moment ago may still be missing: the bus asks again
where it knows better (`fleetbus.bus.nats.publisher`), and compare-and-set refuses who writes upon what is old. Above it is the
bus; below it the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.protocol import (
    NO_RESPONDERS,
    check_subject,
    header_fields,
    parse_time_ns,
    publish_command,
    status_of,
    status_text,
)
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import BusError, RequestUnanswered

BATCH_MESSAGES = 256
BATCH_BYTES = 8 << 20
"""Of one batch; the server stops earlier and says how much is left."""

LAST_BYTES = 1 << 20
"""The same of an answer with the last entries of many subjects, which nobody is in a hurry for."""

HISTORIES_AT_ONCE = 64
"""Of several subjects: an episode that was claimed on thousands of lanes asks no thousands of questions at once."""

_TRIES = 8
_TRY_SECONDS = 4.0
_MISSING_PAUSE_SECONDS = 0.25
_NOT_FOUND = 404
_END_OF_BATCH = 204
_encode = msgspec.json.Encoder().encode


def _parse_entry(payload: bytes, headers: bytes | None) -> StreamEntry:
    fields = header_fields(headers)
    return StreamEntry(
        subject=fields["Nats-Subject"],
        payload=payload,
        sequence=int(fields["Nats-Sequence"]),
        time_ns=parse_time_ns(fields["Nats-Time-Stamp"]),
    )


async def get_last(connection: Connection, stream: str, subject: str) -> StreamEntry | None:
    """The last entry on a literal subject, None if there is none."""
    payload, headers = await connection.api.ask_raw(f"DIRECT.GET.{stream}.{check_subject(subject)}", b"")
    return _parse_answer(subject, payload, headers)


def _parse_answer(subject: str, payload: bytes, headers: bytes | None) -> StreamEntry | None:
    status = status_of(headers)
    if status == _NOT_FOUND:
        return None
    if status:
        raise BusError(f"{subject}: the server answered {status} {status_text(headers or b'')}")
    return _parse_entry(payload, headers)


async def get_last_of_each(connection: Connection, stream: str, subjects: Sequence[str]) -> list[StreamEntry]:
    """The last entries on literal subjects as of one state of the stream, in as many batches as it takes; a replica that lags
    behind the one that answered first leaves out what it does not have."""
    question: dict[str, object] = {
        "multi_last": [check_subject(subject) for subject in subjects],
        "batch": len(subjects),
        "max_bytes": LAST_BYTES,
    }
    found: list[StreamEntry] = []
    while True:
        collector = await _ask_last(connection, stream, question, subjects)
        found += collector.entries
        if collector.complete or not collector.entries:
            return found
        question |= {"seq": collector.next_sequence, "up_to_seq": collector.state}


async def _ask_last(connection: Connection, stream: str, question: dict[str, object], subjects: Sequence[str]) -> _Collector:
    for _ in range(_TRIES):
        collector = _Collector("")
        if await _ask_batch(connection, stream, _encode(question), collector):
            return collector
    raise RequestUnanswered(f"{subjects[0]}: its last entry, and those of {len(subjects) - 1} others, could not be read")


async def get_next(connection: Connection, stream: str, subject: str, start: int) -> StreamEntry | None:
    """The first entry from sequence ``start`` on whose subject matches, None if there is none."""
    question = {"seq": start, "next_by_subj": check_subject(subject)}
    payload, headers = await connection.api.ask_raw(f"DIRECT.GET.{stream}", _encode(question))
    return _parse_answer(subject, payload, headers)


async def get_entry(connection: Connection, stream: str, sequence: int) -> StreamEntry | None:
    """The entry at this position, None where the replica that answers has none."""
    payload, headers = await connection.api.ask_raw(f"DIRECT.GET.{stream}", _encode({"seq": sequence}))
    return _parse_answer(f"entry {sequence} of {stream}", payload, headers)


async def get_history(connection: Connection, stream: str, subject: str) -> list[StreamEntry]:
    """All entries on a literal subject in order, in as many batches as it takes."""
    collector = _Collector(check_subject(subject))
    failures = 0
    while not collector.complete:
        before = collector.next_sequence
        collector.more = False
        if not await _get_batch(connection, stream, collector):
            failures += 1
        elif collector.next_sequence > before:
            failures = 0
        if failures > _TRIES:
            raise RequestUnanswered(f"{subject}: its history could not be read")
    return collector.entries


async def _get_batch(connection: Connection, stream: str, collector: _Collector) -> bool:
    question = {
        "next_by_subj": collector.subject,
        "seq": collector.next_sequence,
        "batch": BATCH_MESSAGES,
        "max_bytes": BATCH_BYTES,
    }
    return await _ask_batch(connection, stream, _encode(question), collector)


async def _ask_batch(connection: Connection, stream: str, question: bytes, collector: _Collector) -> bool:
    """One batch into ``collector``; False if it was not answered in time."""
    request_mux = connection.request_mux
    reply = request_mux.new_reply()
    command = publish_command(f"{connection.api.prefix}.DIRECT.GET.{stream}", reply, question)
    try:
        _, headers = await request_mux.ask(reply, command, timeout=_TRY_SECONDS, take=collector.take)
    except TimeoutError:
        return False
    status = status_of(headers)
    if status == NO_RESPONDERS:
        await anyio.sleep(_MISSING_PAUSE_SECONDS)
        return False
    if status not in (_END_OF_BATCH, _NOT_FOUND):
        raise BusError(f"{collector.subject}: the server answered {status} {status_text(headers or b'')}")
    collector.complete = not collector.more
    return True


class _Collector:
    """Takes the messages of batches as they arrive; after a lost answer the next batch continues after the last one taken."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.entries: list[StreamEntry] = []
        self.next_sequence = 1
        self.more = False
        self.complete = False
        self.state = 0
        """The position up to which the server answered for several subjects."""

    def take(self, payload: bytes, headers: bytes | None) -> bool:
        status = status_of(headers)
        if status:
            fields = header_fields(headers) if status == _END_OF_BATCH else {}
            self.more = int(fields.get("Nats-Num-Pending", 0)) > 0
            self.state = int(fields.get("Nats-UpTo-Sequence", 0))
            return True
        entry = _parse_entry(payload, headers)
        if entry.sequence >= self.next_sequence:
            self.entries.append(entry)
            self.next_sequence = entry.sequence + 1
        return False


async def get_histories(connection: Connection, stream: str, subjects: Sequence[str]) -> list[StreamEntry]:
    """All entries on several literal subjects, merged by sequence; many subjects are asked for at the same time."""
    found: list[StreamEntry] = []
    room = anyio.Semaphore(HISTORIES_AT_ONCE)

    async def collect(subject: str) -> None:
        async with room:
            found.extend(await get_history(connection, stream, subject))

    distinct = list(dict.fromkeys(subjects))
    if len(distinct) == 1:
        await collect(distinct[0])
        return found
    async with open_first_error_task_group() as tasks:
        for subject in distinct:
            tasks.start_soon(collect, subject)
    found.sort(key=lambda entry: entry.sequence)
    return found


class ChunkReader:
    """The payloads of one literal subject in order, a batch at a time, so that no more than one is in memory."""

    def __init__(self, connection: Connection, stream: str, subject: str) -> None:
        self._connection = connection
        self._stream = stream
        self._collector = _Collector(check_subject(subject))

    async def next_batch(self) -> list[bytes] | None:
        """The next payloads, None behind the last one; raises `RequestUnanswered`."""
        collector = self._collector
        for _ in range(_TRIES):
            if collector.complete:
                return None
            collector.more = False
            await _get_batch(self._connection, self._stream, collector)
            if collector.entries:
                batch, collector.entries = [entry.payload for entry in collector.entries], []
                return batch
        raise RequestUnanswered(f"{collector.subject}: could not be read")
