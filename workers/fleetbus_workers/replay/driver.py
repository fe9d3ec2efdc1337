"""The base of the drivers of the three roles: run one real worker, store its recorded inputs, compare what it publishes.

A subclass stores inputs when their recorded cause has happened and compares the answers; `Driver` runs the worker beside it,
keeps to the recorded speed where one is asked for, and collects differences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, NamedTuple

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.concurrency.task_groups import open_flat_task_group
from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from fleetbus.recording.redaction import Redactor
from fleetbus_schemas import Message, decode, encode
from fleetbus_workers.replay.compare import Found, first_difference
from fleetbus_workers.replay.options import Replay, read_configuration
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.replay_environment import ReplayEnvironment
from fleetbus_workers.replay.report import Difference, Report

Work = Callable[[Bus, anyio.Event], Coroutine[Any, Any, None]]
"""The worker under test on its bus, until the event is set."""


class Compared(NamedTuple):
    """A recorded message as a difference names it; ``describe`` gives lines about what led there."""

    name: str
    sequence: int
    episode_id: str = ""
    describe: Callable[[], tuple[str, ...]] = tuple


class ReplayContext:
    """One replay: its recording and options, and what it counts. Made inside the event loop."""

    def __init__(
        self,
        recording: Recording,
        options: Replay,
        *,
        configuration: Configuration | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.recording = recording
        self.options = options
        self.configuration = configuration or read_configuration(recording)
        self.progress = progress or Progress()
        self.report = Report(role=options.role, recorded_seconds=recording.seconds, torn=recording.torn)
        self._first_ns = recording.entries[0].time_ns if recording.entries else 0
        self._started = anyio.current_time()

    def ignore(self, field: str) -> None:
        """Let a further ``Type.field`` differ."""
        self.options = msgspec.structs.replace(self.options, ignored=self.options.ignored | {field})

    async def wait_until_due(self, entry: StreamEntry) -> None:
        """Wait for the entry's recorded time at the replay's speed; return at once if it has none."""
        if self.options.speed:
            due = self._started + (entry.time_ns - self._first_ns) / 1e9 / self.options.speed
            await anyio.sleep(max(0.0, due - anyio.current_time()))


class Driver(ABC):
    """Replays one worker in ``environment``. Messages of ``types`` on subjects of ``kinds`` are received."""

    kinds: ClassVar[tuple[str, ...]]
    types: ClassVar[tuple[type[Message], ...]]

    def __init__(self, context: ReplayContext, environment: ReplayEnvironment, *, start: int = 1) -> None:
        self.context = context
        self.options = context.options
        self.report = context.report
        self.environment = environment
        self.drain = anyio.Event()
        """Set when the worker has to stop as the recorded one did."""
        self._start = start
        self._redactor = Redactor()
        self._delayed = 0

    async def run(self, work: Work) -> None:
        """Run the worker until `drive` returns; what the worker still has to do is cancelled."""
        async with open_flat_task_group() as self._tasks:
            self._tasks.start_soon(work, self.environment.connect_worker(), self.drain)
            with self.environment.read_published(self.kinds, self.types, start=self._start) as self._published:
                await self.drive()
            self._tasks.cancel_scope.cancel()

    @abstractmethod
    async def drive(self) -> None:
        """Store inputs and compare what comes of them, to the end of the recording or to a difference that ends it."""

    def store(self, subject: str, message: Message, recorded: StreamEntry) -> None:
        """Store an input, at its recorded time if the replay has a speed."""
        if self.options.speed:
            self._delayed += 1
            self._tasks.start_soon(self._store_when_due, subject, message, recorded)
        else:
            self.environment.store(subject, message, recorded)

    async def _store_when_due(self, subject: str, message: Message, recorded: StreamEntry) -> None:
        await self.context.wait_until_due(recorded)
        self._delayed -= 1
        self.environment.store(subject, message, recorded)

    async def receive(self, patience_seconds: float | None = None) -> tuple[StreamEntry, Message] | None:
        """The next published message; None if the worker publishes none within the patience, while no input is delayed."""
        patience_seconds = self.options.patience_seconds if patience_seconds is None else patience_seconds
        while True:
            received = await self._published.receive(patience_seconds)
            if received is not None or not self._delayed:
                return received

    def compare(self, recorded: Message, replayed: Message, compared: Compared, subject: str) -> bool:
        """Count a message, and note the first field that differs; True if none does. What a recorder that redacts would have
        removed from the replayed message is no difference."""
        self.report.compared[type(recorded).__name__] += 1
        ignored, tolerance = self.options.ignored, self.options.tolerance
        found = first_difference(recorded, replayed, ignored=ignored, tolerance=tolerance)
        if found is not None and self.context.recording.header.redacted:
            entry = StreamEntry(subject=subject, payload=encode(replayed), sequence=0, time_ns=0)
            redacted = decode(type(replayed), self._redactor.clean(entry).payload)
            found = first_difference(recorded, redacted, ignored=ignored, tolerance=tolerance)
        if found is not None:
            self.note_difference(found, compared)
        return found is None

    def note_difference(self, found: Found, compared: Compared) -> None:
        difference = Difference(
            message=compared.name,
            **found._asdict(),
            sequence=compared.sequence,
            episode_id=compared.episode_id,
            context=compared.describe(),
        )
        self.report.differences.append(difference)

    @property
    def silence(self) -> str:
        """The text that a difference shows for a message that did not come."""
        return f"nothing within {self.options.patience_seconds:g} s"
