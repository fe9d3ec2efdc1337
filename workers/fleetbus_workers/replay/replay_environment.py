"""The in-memory run in which a worker is replayed: a log, and the worker's connection to it.

Everything is stored at new positions. Messages refer to positions, so they are translated when they are stored and back when
they are compared.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.lowlevel
import msgspec

from fleetbus.bus.base import PublishAck, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import HEADER_BYTES, MAX_PAYLOAD_BYTES, MemoryBus
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_objects import MemoryObjectStore
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.objects import ObjectStore
from fleetbus.bus.streams import plan_run
from fleetbus.config.pools import list_pools
from fleetbus.config.seats import list_policies
from fleetbus.config.settings import Configuration
from fleetbus.errors import BusError
from fleetbus.log.episodes import read_entry
from fleetbus.recording import Recording
from fleetbus_schemas import EpisodeFinished, Message, Subjects, encode
from fleetbus_schemas.channels import STORED

WORKER = "replayed"
"""Name of the worker under test."""


class ReplayBus(MemoryBus):
    """`MemoryBus` of the worker under test. It is never disconnected, so a publish stores at once; ``contents`` are objects."""

    def __init__(self, server: MemoryServer, run: str, contents: Mapping[str, bytes]) -> None:
        super().__init__(server, MemoryConnection(True), run, WORKER, 0)
        self._objects = MemoryObjectStore(dict(contents), missing="the recording contains no object {}")

    def objects(self, bucket: str) -> ObjectStore:
        """The same objects for every bucket."""
        return self._objects

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        if len(payload) + HEADER_BYTES > MAX_PAYLOAD_BYTES:
            raise BusError(f"{subject}: {len(payload)} bytes and headers exceed the server's limit of {MAX_PAYLOAD_BYTES}")
        await anyio.lowlevel.checkpoint()
        stream = self._server.stream_for(subject)
        return stream.store(subject, payload, message_id or self._new_id(), expected_last, self._server.now_ns())

    async def _reach(self, what: str) -> None:
        await anyio.lowlevel.checkpoint()


class PublishedMessages:
    """Reads messages of some types from the log, on subjects of some kinds; others are passed over without being decoded."""

    def __init__(
        self, log: MemoryStream, subjects: Subjects, kinds: tuple[str, ...], types: tuple[type[Message], ...], start: int
    ) -> None:
        self._log = log
        self._prefixes = tuple(f"{subjects.log.removesuffix('>')}{kind}." for kind in kinds)
        self._types = types
        self._next = start
        self._stored = anyio.Event()

    async def receive(self, patience_seconds: float) -> tuple[StreamEntry, Message] | None:
        """The next message; None if there is none within ``patience_seconds``. Cancelling loses nothing."""
        found = self._advance()
        if found is None:
            with anyio.move_on_after(patience_seconds):
                while found is None:
                    self._stored = anyio.Event()
                    await self._stored.wait()
                    found = self._advance()
        return found

    def wake(self, entry: StreamEntry) -> None:
        if entry.subject.startswith(self._prefixes):
            self._stored.set()

    def _advance(self) -> tuple[StreamEntry, Message] | None:
        while self._next <= self._log.last_sequence:
            entry = self._log.get(self._next)
            self._next += 1
            if entry is not None and entry.subject.startswith(self._prefixes):
                message = read_entry(STORED[entry.subject.split(".", 3)[2]], entry)
                if isinstance(message, self._types):
                    return entry, message
        return None


class ReplayEnvironment:
    """The log of one replay; ``bus`` is the driver's connection to it."""

    def __init__(self, server: MemoryServer, bus: MemoryBus, configuration: Configuration, objects: dict[str, bytes]) -> None:
        self.bus = bus
        self.configuration = configuration
        self.objects = objects
        self.subjects = Subjects(configuration.run.name)
        self.new_positions: dict[int, int] = {}
        self.recorded_positions: dict[int, int] = {}
        self._server = server
        self._log = server.stream_for(self.subjects.log.replace(">", "task"))

    def connect_worker(self) -> ReplayBus:
        return ReplayBus(self._server, self.configuration.run.name, self.objects)

    def store(self, subject: str, message: Message | bytes, recorded: StreamEntry) -> None:
        """Store an input that was recorded at ``recorded``."""
        payload = message if isinstance(message, bytes) else encode(message, subject=subject)
        number = self.next_sequence
        self._log.store(subject, payload, f"stored-{number}", None, self._server.now_ns())
        self.map_position(recorded.sequence, number)

    def store_as_recorded(self, entry: StreamEntry) -> None:
        self.store(entry.subject, entry.payload, entry)

    def map_position(self, recorded: int, new: int) -> None:
        self.new_positions[recorded] = new
        self.recorded_positions[new] = recorded

    @property
    def next_sequence(self) -> int:
        """Position of what is stored next."""
        return self._log.last_sequence + 1

    def last_sequence_on(self, subject: str) -> int:
        """Position of the newest entry on that subject, 0 if there is none."""
        last = self._log.last(subject)
        return last.sequence if last is not None else 0

    @contextmanager
    def read_published(
        self, kinds: tuple[str, ...], types: tuple[type[Message], ...], *, start: int = 1
    ) -> Iterator[PublishedMessages]:
        """Messages of ``types`` as they are stored on subjects of ``kinds``, from position ``start`` on."""
        published = PublishedMessages(self._log, self.subjects, kinds, types, start)
        self._log.on_stored[published] = published.wake
        try:
            yield published
        finally:
            del self._log.on_stored[published]


def translate_positions(result: EpisodeFinished, positions: Mapping[int, int]) -> EpisodeFinished:
    """A result that refers to the positions of the other log; 0 for what the other log does not hold."""
    actions = tuple(msgspec.structs.replace(each, sequence=positions.get(each.sequence, 0)) for each in result.actions)
    return msgspec.structs.replace(result, actions=actions, request_sequence=positions.get(result.request_sequence, 0))


@asynccontextmanager
async def open_replay_environment(
    recording: Recording, configuration: Configuration, *, pools: tuple[str, ...] = (), policies: tuple[str, ...] = ()
) -> AsyncIterator[ReplayEnvironment]:
    """The declared run, whose clock starts at the time of the first recorded entry."""
    first_ns = recording.entries[0].time_ns if recording.entries else 0
    server = MemoryServer(epoch_ns=first_ns - int(anyio.current_time() * 1e9))
    run = configuration.run
    async with server.connect(run.name, worker="replay") as bus:
        plan = plan_run(
            run.name,
            pools=pools or list_pools(run),
            policies=policies or list_policies(run),
            lanes=configuration.nats.lanes,
            max_bytes=0,
        )
        await bus.declare(plan)
        yield ReplayEnvironment(server, bus, configuration, recording.objects)
