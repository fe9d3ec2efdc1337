"""Where a replay takes place: the recorded run on the in-memory bus, one real worker on it, and hands that feed it.

Everything gets new positions in the new log; messages name positions, so they are translated when they are fed, and back when
they are compared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from fleetbus.bus.base import Bus, Reader, Stored
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from schemas import ActionReference, EpisodeFinished, MalformedMessage, Message, Subjects, encode
from schemas.message import decode_any

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

    async def wait(self, entry: Stored) -> None:
        """Until it is that entry's time."""
        if self._speed:
            due = self._began + (entry.time_ns - self._first_ns) / 1e9 / self._speed
            await anyio.sleep(max(0.0, due - anyio.current_time()))


class Published:
    """What comes into the log, as far as it is of the wanted types."""

    def __init__(self, reader: Reader, types: tuple[type[Message], ...]) -> None:
        self._reader = reader
        self._types = types

    async def receive(self) -> tuple[Stored, Message]:
        """The next one; waits without limit. Cancelling it loses nothing."""
        while True:
            entry = await self._reader.receive()
            try:
                return entry, decode_any(self._types, entry.payload, subject=entry.subject)
            except MalformedMessage:
                continue


class Stage:
    """One replay. ``bus`` is the feeding hand's own connection."""

    def __init__(self, server: MemoryServer, bus: MemoryBus, configuration: Configuration) -> None:
        self.server = server
        self.bus = bus
        self.configuration = configuration
        self.subjects = Subjects(configuration.run.name)
        self.positions = Positions()

    async def feed(self, subject: str, message: Message, recorded: Stored) -> int:
        """Store an input, note its position and return it."""
        sequence = (await self.bus.publish(subject, encode(message, subject=subject))).sequence
        self.positions.note(recorded.sequence, sequence)
        return sequence

    @asynccontextmanager
    async def published(self, types: tuple[type[Message], ...]) -> AsyncIterator[Published]:
        """Messages of these types as they come into the log."""
        async with self.bus.read([self.subjects.log]) as reader:
            yield Published(reader, types)


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
        yield Stage(server, bus, configuration)


async def perform(stage: Stage, work: Work, direct: Callable[[], Awaitable[None]]) -> None:
    """Run the worker while ``direct`` feeds and compares, to the end of the latter; what the worker still has is cancelled."""
    drain = anyio.Event()

    async def play() -> None:
        async with stage.server.connect(stage.configuration.run.name, worker=WORKER) as bus:
            await work(bus, drain)

    async with anyio.create_task_group() as group:
        group.start_soon(play)
        await direct()
        group.cancel_scope.cancel()
