"""The recorder: follows the log into an archive, and keeps the log below its limit by removing what the archive holds.

Above it is the command line; below are the bus and the archive's files. One recorder per run works at a time. It continues
where the archive ends; of what is archived it reads again only what decides about trimming, which is kept as long as it does.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus, LogBus, Reader, StreamEntry
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration
from fleetbus.delivery.control import Control
from fleetbus.delivery.lanes import LEASE_SECONDS, Lane, NoLaneFree, claim_lane
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus.errors import BusClosed, BusError, UserError, is_disk_full
from fleetbus.log.archive_format import ArchiveDamaged
from fleetbus.log.archive_reader import find_first_lost
from fleetbus.log.archive_retention import remove_segments
from fleetbus.log.archive_writer import ArchiveWriter, open_archive
from fleetbus_schemas import Heartbeat, Subjects
from fleetbus_workers.recorder.archive_keeper import SEGMENT_BYTES, ArchiveKeeper, compute_segment_limits
from fleetbus_workers.recorder.log_trimmer import SETTLE_SECONDS, LogTrimmer

LANE = "recorder"

FULL_DISK_SECONDS = 10.0
"""Between two tries to write on a disk without room."""

log = structlog.get_logger()


class RecorderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is synced after ``batch_seconds`` or ``batch_bytes``; the log is trimmed every ``trim_seconds``; what has been
    settled for ``settle_seconds`` leaves it for good. The archive is kept within its limits every ``keep_seconds``."""

    batch_seconds: float = 0.25
    batch_bytes: int = 4 << 20
    trim_seconds: float = 5.0
    keep_seconds: float = 60.0
    segment_bytes: int = SEGMENT_BYTES
    settle_seconds: float = SETTLE_SECONDS


class Recorder:
    """One recorder on an open archive."""

    def __init__(
        self,
        bus: LogBus,
        *,
        subjects: Subjects,
        settings: RecorderSettings,
        archive: ArchiveWriter,
        trimmer: LogTrimmer,
        keeper: ArchiveKeeper,
        drain: anyio.Event,
        drain_seconds: float,
        runtime: Runtime,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._settings = settings
        self._archive = archive
        self._trimmer = trimmer
        self._keeper = keeper
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._runtime = runtime
        self._clock_ahead_ns = bus.now_ns() - int(anyio.current_time() * 1e9)
        """By how much the server's clock is ahead of this process's, as of the beginning."""
        self._archived = 0
        self._archived_bytes = 0
        self._advanced = anyio.Event()

    async def run(self) -> None:
        """Follow the log until drained; then archive what is there by then, and return."""
        last = self._archive.last_sequence
        await self._trimmer.load_archived(last)
        async with self._bus.read([self._subjects.log], start=last + 1) as reader, anyio.create_task_group() as group:
            group.start_soon(self._archive_entries, reader)
            group.start_soon(self._trim_periodically)
            if self._keeper.has_work:
                group.start_soon(self._keep_periodically)
            await self._drain.wait()
            with anyio.move_on_after(self._drain_seconds):
                await self._archive_remaining()
            group.cancel_scope.cancel()
        if self._keeper.has_work:
            with anyio.move_on_after(self._drain_seconds):
                await self._keep(is_end=True)

    def heartbeat(self, worker: str) -> Heartbeat:
        return Heartbeat(
            role="recorder",
            worker=worker,
            slots=1,
            lane=LANE,
            draining=self._drain.is_set(),
            counters={
                "archived": float(self._archived),
                "archived_bytes": float(self._archived_bytes),
                "archived_up_to": float(self._trimmer.last_entered),
                "trimmed_up_to": float(self._trimmer.trimmed),
                "unsettled": float(self._trimmer.unsettled),
            },
        )

    async def _archive_entries(self, reader: Reader) -> None:
        while True:
            batch = await self._collect(reader)
            await self._append(batch)
            for entry in batch:
                self._trimmer.enter(entry)
            self._archived += len(batch)
            self._archived_bytes += sum(len(entry.payload) for entry in batch)
            self._advanced.set()
            self._advanced = anyio.Event()

    async def _append(self, batch: Sequence[StreamEntry]) -> None:
        """Archive a batch; a full disk is waited for, as the log waits for the archive."""
        archive, offload, is_torn = self._archive, self._runtime.offload, False
        while True:
            try:
                if is_torn:
                    await offload(archive.recover)
                await offload(archive.append, [entry for entry in batch if entry.sequence > archive.last_sequence])
                return
            except OSError as error:
                if not is_disk_full(error):
                    raise
                log.error("disk is full; waiting for free space", reason=str(error))
            is_torn = True
            await anyio.sleep(FULL_DISK_SECONDS)

    async def _collect(self, reader: Reader) -> list[StreamEntry]:
        """The next entries: at least one, as many as come in a batch's time, up to a batch's bytes."""
        batch = [await reader.receive()]
        size = len(batch[0].payload)
        with anyio.move_on_after(self._settings.batch_seconds):
            while size < self._settings.batch_bytes:
                batch.append(await reader.receive())
                size += len(batch[-1].payload)
        return batch

    async def _trim_periodically(self) -> None:
        while True:
            await anyio.sleep(self._settings.trim_seconds)
            try:
                await self._trimmer.trim()
            except BusClosed:
                raise
            except (BusError, OSError) as error:
                if isinstance(error, OSError) and not is_disk_full(error):
                    raise
                log.warning("log trim failed; retrying", reason=str(error))

    async def _keep_periodically(self) -> None:
        while True:
            await anyio.sleep(self._settings.keep_seconds)
            await self._keep()

    async def _keep(self, *, is_end: bool = False) -> None:
        """A store that is away for an hour costs nothing but room: until it is back nothing leaves the folder. Nor does
        anything leave for good because the server's clock was set forward."""
        needed = self._trimmer.find_archive_floor()
        now_ns = min(self._bus.now_ns(), self._clock_ahead_ns + int(anyio.current_time() * 1e9))
        keep = partial(self._keeper.keep, now_ns=now_ns, needed=needed, is_end=is_end)
        try:
            await self._runtime.offload(keep)
        except (OSError, ArchiveDamaged) as error:
            log.error("archive could not be copied or shortened; retrying", reason=str(error))

    async def _archive_remaining(self) -> None:
        end = (await self._bus.log_state()).last_sequence
        while self._trimmer.last_entered < end:
            await self._advanced.wait()


async def run_recorder(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    folder: Path,
    settings: RecorderSettings | None = None,
    runtime: Runtime | None = None,
) -> None:
    """A recorder from claiming its place to its last entry. Raises `UserError` when the run has one already, or ``folder`` is
    the archive of something else."""
    runtime, settings = runtime or Runtime(), settings or RecorderSettings()
    subjects = Subjects(configuration.run.name)
    keeper = ArchiveKeeper(folder, configuration.recorder)
    await runtime.offload(keeper.begin)
    limits = compute_segment_limits(configuration.recorder, settings.segment_bytes)
    with open_archive(folder, subjects.run, segment_bytes=limits.size_bytes, segment_seconds=limits.seconds) as archive:
        await _check_same_log(bus, subjects, folder, archive)
        if archive.last is None:  # a restored log may begin later
            await runtime.offload(remove_segments, folder, (await bus.log_state()).begins)
        lane = await _claim_lane(bus, subjects, name, runtime)
        window_seconds = (await bus.log_state()).duplicate_window_seconds
        trimmer = LogTrimmer(
            bus, subjects, archive, window_seconds=window_seconds, runtime=runtime, settle_seconds=settings.settle_seconds
        )
        drain_seconds = configuration.limits.drain
        recorder = Recorder(
            bus, subjects=subjects, settings=settings, archive=archive, trimmer=trimmer, keeper=keeper, drain=drain,
            drain_seconds=drain_seconds, runtime=runtime,
        )  # fmt: skip
        lifecycle = WorkerLifecycle(
            bus, subjects, role="recorder", worker=name, beat=lambda: recorder.heartbeat(name), lane=lane
        )
        control = Control(bus, subjects, role="recorder", worker=name, drain=drain)
        async with run_lifecycle(lifecycle, bus, lane, slots=1), anyio.create_task_group() as group:
            group.start_soon(control.run)
            await recorder.run()
            await lifecycle.publish_draining(in_flight=0)
            group.cancel_scope.cancel()


async def _claim_lane(bus: LogBus, subjects: Subjects, name: str, runtime: Runtime) -> Lane:
    try:
        return await claim_lane(
            bus,
            subjects,
            role="recorder",
            names=(LANE,),
            worker=name,
            nonce=runtime.nonce(),
            wait_seconds=LEASE_SECONDS + 5,
        )
    except NoLaneFree as taken:
        raise UserError(f"run {subjects.run} already has a recorder: stop it before you start another") from taken


async def _check_same_log(bus: LogBus, subjects: Subjects, folder: Path, archive: ArchiveWriter) -> None:
    """A run that was removed and made again has the same name and another log, and a log may go back in time: its entries must
    not follow the archived ones."""
    if archive.last is None:
        return
    lost = await find_first_lost(bus, subjects, folder)
    if lost is not None:
        raise UserError(
            f"the log of run {subjects.run} lost entries from {lost} on, which {folder} has up to {archive.last_sequence} "
            f"(a loss of power, a restored volume): `fleetbus audit {subjects.run} --archive {folder}` names them; give "
            "another --archive to continue"
        )
