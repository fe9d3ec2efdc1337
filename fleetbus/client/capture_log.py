"""Records of calls by rollout on a log, with a strict fence: for trainers that freeze what was captured before they use it.

All that is said of a rollout stands on one subject, and each entry expects the last one. So a record is in the frozen snapshot,
or its writer is told that it came too late; nothing in between (docs/decisions/0259-captures-are-fenced-by-compare-and-set.md).
The bytes of a record stand on a subject of its call, before the entry that names their sequences. Above it is the client of a
trainer (`fleetbus.client.nemo_gym`), below it the bus.
"""

from __future__ import annotations

import hashlib
import logging
import secrets

import anyio
import msgspec

from fleetbus.bus.base import LogBus
from fleetbus.errors import BusError, FleetbusError, SequenceConflict

CHUNK_BYTES = 512 << 10
"""Of one message; a server takes 1 MiB by default, and a record of many tokens is longer."""

LAG_PAUSES_SECONDS = (0.0, 0.05, 0.25, 1.0, 2.0)
"""A replica may have the entry that names the parts of a record before it has all parts."""

log = logging.getLogger(__name__)


class CaptureClosed(FleetbusError):
    """The rollout is frozen or retired: what was to be written is not in its record, and never will be."""


class CaptureConflict(FleetbusError):
    """A call of this rollout stands in its record with another payload; the rollout is marked incomplete."""


class Stored(msgspec.Struct, frozen=True):
    """A record: the SHA-256 of its bytes, and the sequences of the messages that hold them, in order."""

    digest: str
    parts: tuple[int, ...]


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry on the subject of a rollout; ``rollout`` is its id in plain words, for people who read the log."""

    what: str
    rollout: str
    call: str = ""
    stored: Stored | None = None
    snapshot_id: str = ""
    version: int = 0


class Capture(msgspec.Struct):
    """A rollout as its entries say. ``version`` is the sequence of the last one, 0 without any; ``places`` are those of the
    entries that name a record, by call."""

    version: int = 0
    records: dict[str, Stored] = {}
    places: dict[str, int] = {}
    begun: set[str] = set()
    marked: bool = False
    snapshot_id: str = ""
    retired: Said | None = None

    def check(self, rollout: str, *, unfrozen: bool = True) -> None:
        """Raise `CaptureClosed` if it is retired or, with ``unfrozen``, frozen."""
        if self.retired or (unfrozen and self.snapshot_id):
            raise CaptureClosed(f"the capture of rollout {rollout!r} is {'retired' if self.retired else 'frozen'}")


class Snapshot(msgspec.Struct, frozen=True):
    """A frozen rollout: its records by call, in the order in which they were stored."""

    records: dict[str, bytes]
    incomplete: bool
    snapshot_id: str
    version: int


class CaptureLog:
    """Records of rollouts on the log of a run. Every call raises `fleetbus.errors.BusError` where the log does not answer: then
    it is done or not, and may be repeated. Ids are any text."""

    def __init__(self, bus: LogBus, run: str) -> None:
        self._bus = bus
        self._prefix = f"fb.{run}.capture"

    async def put(self, rollout: str, call: str, payload: bytes) -> None:
        """Store a record; again with the same bytes it does nothing. Raises `CaptureClosed` or `CaptureConflict`."""
        digest = hashlib.sha256(payload).hexdigest()
        parts: tuple[int, ...] = ()
        while True:
            capture = await self.read(rollout)
            if (known := capture.records.get(call)) is not None:
                if known.digest == digest:
                    return
                await self.mark_incomplete(rollout, call)
                raise CaptureConflict(f"call {call!r} of rollout {rollout!r} stands in the record with another payload")
            if parts and (capture.retired or capture.snapshot_id):  # nobody will ever read them, and no sweep would find them
                await self._purge(self._subject(rollout, call), parts[-1] + 1)
            capture.check(rollout)
            parts = parts or await self._store(rollout, call, payload)
            if await self._say(capture, Said(what="record", rollout=rollout, call=call, stored=Stored(digest, parts))):
                return

    async def begin_call(self, rollout: str, call: str) -> None:
        """Say that a call goes out; without a record of it the snapshot is incomplete. Raises `CaptureClosed`."""
        while call not in (capture := await self.read(rollout)).begun:
            capture.check(rollout)
            if await self._say(capture, Said(what="begin", rollout=rollout, call=call)):
                return

    async def mark_incomplete(self, rollout: str, call: str = "") -> None:
        """Say that a record is missing: works after a freeze, and is another version. Raises `CaptureClosed` once retired."""
        while True:
            capture = await self.read(rollout)
            capture.check(rollout, unfrozen=False)
            if await self._say(capture, Said(what="incomplete", rollout=rollout, call=call)):
                return

    async def freeze(self, rollout: str) -> Snapshot:
        """Close the rollout to further records and return those that it has. Raises `CaptureClosed` once retired."""
        while not (capture := await self.read(rollout)).snapshot_id or capture.retired:
            capture.check(rollout, unfrozen=False)
            await self._say(capture, Said(what="freeze", rollout=rollout, snapshot_id=secrets.token_hex(16)))
        records = {call: await self.load(rollout, call, stored) for call, stored in capture.records.items()}
        incomplete = capture.marked or not capture.begun <= records.keys()
        return Snapshot(records, incomplete, capture.snapshot_id, capture.version)

    async def drop(self, rollout: str, snapshot_id: str, version: int) -> bool:
        """Remove exactly this snapshot; False if the rollout is at another version. A tombstone stays until `sweep`."""
        while (retired := (capture := await self.read(rollout)).retired) is None:
            if not snapshot_id or (capture.snapshot_id, capture.version) != (snapshot_id, version):
                return False
            await self._say(capture, Said(what="retire", rollout=rollout, snapshot_id=snapshot_id, version=version))
        await self._purge(self._subject(rollout), capture.version)
        return (retired.snapshot_id, retired.version) == (snapshot_id, version)

    async def sweep(self, older_than_seconds: float) -> int:
        """Forget rollouts that were retired longer ago than that, and return how many: a writer of one of these could
        begin it anew. Removes what a `drop` that was killed has left of the others, too."""
        swept = 0
        for subject in await self._bus.list_subjects(f"{self._prefix}.*"):
            last = await self._bus.last(subject)
            if last is not None and msgspec.json.decode(last.payload, type=Said).what == "retire":
                forgotten = self._bus.now_ns() - last.time_ns > older_than_seconds * 1e9
                await self._purge(subject, last.sequence + 1 if forgotten else last.sequence)
                swept += forgotten
        return swept

    async def read(self, rollout: str) -> Capture:
        """All that is said of a rollout."""
        capture = Capture()
        for entry in await self._bus.history([self._subject(rollout)]):
            said = msgspec.json.decode(entry.payload, type=Said)
            capture.version = entry.sequence
            if said.what == "record" and said.stored is not None:
                capture.records[said.call], capture.places[said.call] = said.stored, entry.sequence
            elif said.what == "begin":
                capture.begun.add(said.call)
            elif said.what == "freeze":
                capture.snapshot_id = said.snapshot_id
            elif said.what == "retire":
                capture.retired = said
            capture.marked |= said.what == "incomplete"
        return capture

    async def load(self, rollout: str, call: str, stored: Stored) -> bytes:
        """The bytes of a record; raises `BusError` if the log does not have them any more."""
        for pause in LAG_PAUSES_SECONDS:
            await anyio.sleep(pause)
            found = {entry.sequence: entry.payload for entry in await self._bus.history([self._subject(rollout, call)])}
            payload = b"".join(found.get(sequence, b"") for sequence in stored.parts)
            if hashlib.sha256(payload).hexdigest() == stored.digest:
                return payload
        raise BusError(f"the log does not have all of call {call!r} of rollout {rollout!r}: it was retired or lost meanwhile")

    async def _store(self, rollout: str, call: str, payload: bytes) -> tuple[int, ...]:
        parts = [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]
        subject = self._subject(rollout, call)
        return tuple([(await self._bus.publish(subject, part)).sequence for part in parts])

    async def _say(self, capture: Capture, said: Said) -> bool:
        """False if something else was said since ``capture`` was read, or this very entry, by a try whose answer was lost."""
        try:
            await self._bus.publish(self._subject(said.rollout), msgspec.json.encode(said), expected_last=capture.version)
        except SequenceConflict:
            return False
        return True

    async def _purge(self, subject: str, below: int) -> None:
        try:
            await self._bus.purge(f"{subject}.*", below=below)
            await self._bus.purge(subject, below=below)
        except BusError as error:
            log.warning("%s: what was retired stays until it is swept: %s", subject, error)

    def _subject(self, *ids: str) -> str:
        return ".".join([self._prefix, *(hashlib.sha256(each.encode()).hexdigest()[:40] for each in ids)])
