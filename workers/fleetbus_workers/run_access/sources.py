"""``RUN|FILE``: the entries that a reader looks at come from a run's log or from a recording."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory_subjects import any_matcher
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus.recording.reader import RecordingReader, read_header
from fleetbus_schemas import Message, Subjects
from fleetbus_workers.observe.run.nats_servers import parse_monitoring_addresses
from fleetbus_workers.run_access.log_access import is_reachable, open_run
from fleetbus_workers.run_access.server_address import read_server_address

if TYPE_CHECKING:
    from fleetbus.recording.episodes import Transcript


class Source:
    """The source of entries: ``bus`` for a run within reach, ``file`` for a recording, ``archive`` alone or besides."""

    def __init__(self, run: str, *, bus: Bus | None = None, file: Path | None = None, archive: Path | None = None) -> None:
        self.subjects: Subjects = Subjects(run)
        self.bus = bus
        self.file = file
        self.archive = archive
        self.torn = ""
        """What is missing at the end of a recording, once it was read."""
        self.objects: dict[str, bytes] = {}
        """The objects of a recording, once it was read."""
        self.files: dict[str, bytes] = {}
        """The weights in a recording, once it was read."""

    async def entries(self, subjects: list[str] | None = None) -> AsyncGenerator[StreamEntry]:
        """All entries, or those that match one of these subjects (wildcards allowed), in order. Who leaves early closes it."""
        if self.bus is not None and self.archive is None and subjects:
            async with aclosing(cast("AsyncGenerator[StreamEntry]", self.bus.scan(subjects))) as entries:
                async for entry in entries:
                    yield entry
            return
        matches = any_matcher(subjects or [self.subjects.log])
        async for entry in self._all():
            if matches(entry.subject):
                yield entry

    async def messages(self, kinds: Collection[str], policy: str) -> AsyncGenerator[tuple[Message, StreamEntry]]:
        """The messages on subjects of these kinds that can be read, learners' of one ``policy`` alone, each with its entry."""
        from fleetbus.log.stored_entries import read_stored

        train = self.subjects.train(policy)
        async with aclosing(self.entries()) as entries:
            async for entry in entries:
                kind = entry.subject.split(".", 3)[2]
                is_wanted = kind in kinds and (kind != "train" or entry.subject == train)
                if is_wanted and (message := read_stored(entry)) is not None:
                    yield message, entry

    async def transcripts(self) -> AsyncGenerator[Transcript]:
        """The transcript of each episode, in the order in which they finished; those without a result come last."""
        from fleetbus.recording.rows import TranscriptFold, list_transcript_subjects

        fold = TranscriptFold()
        async with aclosing(self.entries(list_transcript_subjects(self.subjects))) as entries:
            async for entry in entries:
                if (transcript := fold.add(entry)) is not None:
                    yield transcript
        for transcript in fold.unfinished():
            yield transcript

    async def _all(self) -> AsyncIterator[StreamEntry]:
        from fleetbus.log.archive_reader import scan_archive, scan_archive_and_log
        from fleetbus.recording.export import scan_recording

        if self.file is not None:
            reader = RecordingReader(self.file)
            async for entry in scan_recording(reader):
                yield entry
            self.torn, self.objects, self.files = reader.torn, reader.objects, reader.files
        elif self.bus is not None:
            async for entry in scan_archive_and_log(self.bus, self.subjects, self.archive):
                yield entry
        elif self.archive is not None:
            async for entry in scan_archive(self.archive, run=self.subjects.run):
                yield entry


def find_monitor_address(configuration: Configuration) -> str:
    """Monitoring address of the server that `up` started on this machine, empty if unknown."""
    address = None if configuration.nats.url else read_server_address(run_folder(configuration.run))
    return address.monitor if address else ""


def resolve_nats_http(configuration: Configuration, given: str) -> str | None:
    """The addresses of the servers' monitoring, with commas: those that were given, or that of `up`; empty if it is
    unknown, None for a run that is not served. Raises `UserError` for what is no address."""
    known = parse_monitoring_addresses(given) or find_monitor_address(configuration)
    return known if known or configuration.nats.url else None


def build_address_resolver(configuration: Configuration, given: str) -> Callable[[], str | None]:
    """`resolve_nats_http` as of whenever it is called: a run that is resumed has a server with another address. Raises
    `UserError`
    at once."""
    resolve_nats_http(configuration, given)
    return partial(resolve_nats_http, configuration, given)


def is_recording(name: str | None) -> bool:
    """True if ``RUN|FILE`` names a file rather than a run."""
    try:
        return bool(name) and (Path(str(name)).is_file() or str(name).endswith(".fbrec"))
    except OSError:  # too long for a file's name, for example
        return False


@asynccontextmanager
async def open_source(name: str | None, configuration: Configuration, archive: Path | None = None) -> AsyncIterator[Source]:
    """The recording if ``name`` is one, else the run of the configuration; raises `UserError`."""
    if is_recording(name):
        yield Source(read_header(Path(str(name))).run, file=Path(str(name)))
        return
    run = configuration.run.name
    if archive is not None and not is_reachable(configuration):
        yield Source(run, archive=archive)
        return
    async with open_run(configuration, "look", own_server=True) as bus:
        yield Source(run, bus=bus, archive=archive)
