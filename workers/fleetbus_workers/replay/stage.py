"""Where a replay takes place: the recorded run on the in-memory bus, one real worker on it, and hands that feed it.

Everything gets new positions in the new log; messages name positions, so they are translated when they are fed, and back when
they are compared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from fleetbus_schemas import (
    ActionReference,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    MalformedMessage,
    Message,
    Subjects,
    encode,
)
from fleetbus_schemas.message import decode_any
from fleetbus_workers.replay.stage_bus import stage_bus

WORKER = "replayed"
"""Name of the worker under test."""

PATIENCE_SECONDS = 60.0
"""A worker that publishes nothing of what is expected for this long is taken to hang."""


class Positions:
    """Which recorded entry stands where in the replay's log, and the other way round."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._recorded: dict[int, int] = {}

    def note(self, recorded: int, new: int) -> None:
        self._new[recorded] = new
        self._recorded[new] = recorded

    def new(self, recorded: int) -> int:
        """0 for what is not in the replay's log."""
        return self._new.get(recorded, 0)

    def recorded(self, new: int) -> int:
        return self._recorded.get(new, 0)

    def translated(self, result: EpisodeFinished, place: Callable[[int], int]) -> EpisodeFinished:
        """A result whose positions are those of the other log; ``place`` is `new` or `recorded`."""
        actions = tuple(
            ActionReference(sequence=place(each.sequence), lane=each.lane, turn=each.turn) for each in result.actions
        )
        return msgspec.structs.replace(result, actions=actions, request_sequence=place(result.request_sequence))


class Pace:
    """Feeds at ``speed`` times the recorded speed; None is as fast as the worker goes."""

    def __init__(self, recording: Recording, speed: float | None) -> None:
        self._speed = speed
        self._first_ns = recording.entries[0].time_ns if recording.entries else 0
        self._began = anyio.current_time()

    @property
    def is_free(self) -> bool:
        """True if nothing ever waits."""
        return not self._speed

    async def wait(self, entry: StreamEntry) -> None:
        """Until it is that entry's time."""
        if self._speed:
            due = self._began + (entry.time_ns - self._first_ns) / 1e9 / self._speed
            await anyio.sleep(max(0.0, due - anyio.current_time()))


class Published:
    """What comes into the log on subjects of some kinds, as far as it is of the wanted types.

    It reads the stream itself: nothing of what nobody compares is decoded, and nothing waits while there is more to read.
    """

    def __init__(
        self, stream: MemoryStream, subjects: Subjects, kinds: tuple[str, ...], types: tuple[type[Message], ...], start: int
    ) -> None:
        self._stream = stream
        self._beginnings = tuple(f"{subjects.log.removesuffix('>')}{kind}." for kind in kinds)
        self._types = types
        self._decoded = (*types, *BESIDE) if "episode" in kinds else types
        self._next = start
        self._wake = anyio.Event()

    async def receive(self, patience_seconds: float) -> tuple[StreamEntry, Message] | None:
        """The next one, or None when there was none for so long. Cancelling it loses nothing."""
        found = self._advance()
        if found is None:
            with anyio.move_on_after(patience_seconds):
                while found is None:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                    found = self._advance()
        return found

    def on_stored(self, entry: StreamEntry) -> None:
        if not self._wake.is_set() and entry.subject.startswith(self._beginnings):
            self._wake.set()

    def _advance(self) -> tuple[StreamEntry, Message] | None:
        while self._next <= self._stream.last_sequence:
            entry = self._stream.get(self._next)
            self._next += 1
            if entry is None or not entry.subject.startswith(self._beginnings):
                continue
            try:
                message = decode_any(self._decoded, entry.payload, subject=entry.subject)
            except MalformedMessage:
                continue
            if isinstance(message, self._types):
                return entry, message
        return None


BESIDE: tuple[type[Message], ...] = (AttemptStarted, AttemptReleased)
"""What stands beside results, and is told from them more cheaply decoded than refused."""


class Stage:
    """One replay. ``bus`` is the feeding hand's own connection."""

    def __init__(self, server: MemoryServer, bus: MemoryBus, configuration: Configuration, objects: dict[str, bytes]) -> None:
        self.server = server
        self.objects = objects
        self.bus = bus
        self.configuration = configuration
        self.subjects = Subjects(configuration.run.name)
        self.positions = Positions()
        self._log = server.stream_for(self.subjects.log.replace(">", "task"))
        self._fed = 0

    def feed(self, subject: str, message: Message, recorded: StreamEntry) -> int:
        """Store an input, note its position and return it."""
        return self._store(subject, encode(message, subject=subject), recorded)

    def feed_as_recorded(self, entry: StreamEntry) -> int:
        """Store an entry as it was recorded, note its position and return it."""
        return self._store(entry.subject, entry.payload, entry)

    def _store(self, subject: str, payload: bytes, recorded: StreamEntry) -> int:
        self._fed += 1
        sequence = self._log.store(subject, payload, f"fed-{self._fed}", None, self.server.now_ns()).sequence
        self.positions.note(recorded.sequence, sequence)
        return sequence

    @property
    def next_sequence(self) -> int:
        """Position of what is stored next."""
        return self._log.last_sequence + 1

    def last_sequence_on(self, subject: str) -> int:
        """Position of the newest entry on that subject, 0 if there is none."""
        last = self._log.last(subject)
        return last.sequence if last is not None else 0

    @contextmanager
    def published(self, *kinds: str, types: tuple[type[Message], ...], start: int = 1) -> Iterator[Published]:
        """Messages of these types as they come into the log on subjects of these kinds, from position ``start`` on."""
        published = Published(self._log, self.subjects, kinds, types, start)
        self._log.on_stored[published] = published.on_stored
        try:
            yield published
        finally:
            del self._log.on_stored[published]


Work = Callable[[Bus, anyio.Event], Awaitable[None]]
"""The worker under test on its bus, until the event is set."""


@asynccontextmanager
async def staged(
    recording: Recording,
    configuration: Configuration,
    *,
    pools: tuple[str, ...],
    policies: tuple[str, ...],
) -> AsyncIterator[Stage]:
    """The declared run, its clock beginning where the recording begins."""
    first_ns = recording.entries[0].time_ns if recording.entries else 0
    server = MemoryServer(epoch_ns=first_ns - int(anyio.current_time() * 1e9))
    run = configuration.run.name
    async with server.connect(run, worker="replay") as bus:
        await bus.declare(plan_run(run, pools=pools, policies=policies, lanes=configuration.nats.lanes, max_bytes=0))
        yield Stage(server, bus, configuration, recording.objects)


async def perform(stage: Stage, work: Work, direct: Callable[[], Awaitable[None]]) -> None:
    """Run the worker while ``direct`` feeds and compares, to the end of the latter; what the worker still has is cancelled."""
    drain = anyio.Event()

    async def play() -> None:
        await work(stage_bus(stage.server, stage.configuration.run.name, WORKER, stage.objects), drain)

    async with anyio.create_task_group() as group:
        group.start_soon(play)
        await direct()
        group.cancel_scope.cancel()
