"""Removing the oldest of an archive: what may go, a kill in between, a store that lies, and what an audit says of the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.audit.run import audit_archive, audit_run
from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.check import check_configuration
from fleetbus.config.settings import ArchiveSettings, Configuration
from fleetbus.core.audit.findings import Report
from fleetbus.core.training.retention import KEPT_CHECKPOINTS, KEPT_VERSIONS, Retention
from fleetbus.errors import UserError
from fleetbus.log import archive_retention
from fleetbus.log.archive_format import (
    ArchiveDamaged,
    build_segment_path,
    encode_segment_start,
    list_segments,
    parse_first_sequence,
)
from fleetbus.log.archive_reader import read_archive
from fleetbus.log.archive_retention import (
    HOUR_NS,
    NOTE,
    ArchiveShortened,
    Keep,
    Segment,
    choose_first_kept,
    describe_segments,
    find_latest_begin,
    list_kept_segments,
    read_begin,
    read_removed,
    remove_segments,
)
from fleetbus.log.archive_writer import open_archive
from fleetbus_schemas import (
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    FloorRaised,
    LineageStarted,
    Message,
    Observation,
    PolicyPublished,
)
from fleetbus_workers.recorder.archive_keeper import ArchiveKeeper, compute_segment_limits
from tests.support.log_builder import SUBJECTS, LogBuilder, kinds, read_entries

SIZE = 100
SEGMENTS = [Segment(first=1 + 10 * index, size_bytes=SIZE) for index in range(5)]


def choose(needed: int = 1000, now_hours: int = 100, **keep: Any) -> int:
    """The begin of five segments of ten entries each, that of index n begun at n hours."""
    return choose_first_kept(
        SEGMENTS, Keep(**keep), now_ns=now_hours * HOUR_NS, needed=needed, read_begin=lambda each: each.first // 10 * HOUR_NS
    )


def test_whole_segments_leave_that_are_too_old_or_too_many_and_the_newest_stays() -> None:
    assert choose() == 1
    assert choose(hours=200) == 1
    assert choose(hours=98.5) == 11  # its first entry is 99 hours old, but its last may be 98
    assert choose(hours=1) == 41
    assert choose(size_bytes=5 * SIZE) == 1
    assert choose(size_bytes=3 * SIZE) == 21
    assert choose(size_bytes=1) == 41
    assert choose_first_kept([], Keep(hours=1), now_ns=0, needed=9, read_begin=lambda each: 0) == 1


@pytest.mark.parametrize("wrong_hours", [-50, 50])
@pytest.mark.parametrize("known_from", [0, 4])
def test_nothing_leaves_too_early_or_stays_for_long_because_the_servers_clock_was_wrong_for_a_while(
    wrong_hours: int, known_from: int
) -> None:
    """Seen an hour later, what was recorded by a clock that was behind was old; by one that was ahead it stayed for as long."""
    segments = [Segment(first=1 + hour, size_bytes=SIZE) for hour in range(30)]

    def read_begin(segment: Segment) -> int:
        """One begins with each hour; for four of them the clock is wrong."""
        hour = segment.first - 1
        return (100 + hour + (wrong_hours if 5 <= hour < 9 else 0)) * HOUR_NS

    for hour in range(10, 30):
        there = segments[known_from : hour + 1]
        now_ns = (100 + hour) * HOUR_NS + 1
        kept = choose_first_kept(there, Keep(hours=3), now_ns=now_ns, needed=1000, read_begin=read_begin) - 1
        right = max(hour - 3, known_from)
        assert (4 if 5 <= right < 9 else right) <= kept <= right, f"seen at hour {hour}"


@pytest.mark.parametrize("noted", [True, False])
def test_what_began_by_a_clock_that_was_behind_stays_also_where_size_removed_all_that_began_before(noted: bool) -> None:
    """The note of what was removed says by when the first of those that are left had begun."""
    hours = {1: 100, 2: 101, 3: 102, 4: 53, 5: 54, 6: 55, 7: 106}
    segments = [Segment(first=first, size_bytes=SIZE) for first in hours]

    def read_hour(segment: Segment) -> int:
        return hours[segment.first] * HOUR_NS

    now_ns = 107 * HOUR_NS
    begun_ns = find_latest_begin(segments[:3], 0, now_ns=now_ns, read_begin=read_hour)
    assert begun_ns == 102 * HOUR_NS
    kept = choose_first_kept(
        segments[3:],
        Keep(hours=12),
        now_ns=now_ns,
        needed=1000,
        read_begin=read_hour,
        begun_ns=begun_ns if noted else 0,
    )
    assert kept == (4 if noted else 6)


def test_the_archive_notes_by_when_what_it_removed_had_begun(tmp_path: Path) -> None:
    archive_log(tmp_path / "archive", read_entries(build_run()))
    began = [read_begin(segment) for segment in list_segments(tmp_path / "archive")]
    size_bytes = sum(segment.stat().st_size for segment in list_segments(tmp_path / "archive")[3:])
    keeper = ArchiveKeeper(tmp_path / "archive", ArchiveSettings(keep_bytes=size_bytes, keep_hours=1e6))
    keeper.keep(now_ns=began[-1] + 1, needed=1 << 60)
    removed = read_removed(tmp_path / "archive")
    assert removed.below > 1 and removed.begun_ns == began[2]


def test_each_segment_is_read_once_however_many_began_by_a_clock_that_was_ahead() -> None:
    """Of a store each is fetched: those of a day that nobody can date were read again for every one that leaves."""
    segments, read = [Segment(first=1 + hour, size_bytes=SIZE) for hour in range(60)], list[int]()

    def read_begin(segment: Segment) -> int:
        read.append(segment.first)
        return (segment.first + (5000 if segment.first < 50 else 0)) * HOUR_NS

    assert choose_first_kept(segments, Keep(hours=3), now_ns=58 * HOUR_NS, needed=1000, read_begin=read_begin) == 54
    assert read == sorted(set(read))


def test_a_segment_with_an_entry_that_is_needed_stays_whatever_the_limits_say() -> None:
    assert choose(needed=20, size_bytes=1) == 11
    assert choose(needed=21, size_bytes=1) == 21
    assert choose(needed=0, hours=1, size_bytes=1) == 1


def archive_log(folder: Path, entries: list[StreamEntry], segment_bytes: int = 500) -> None:
    with open_archive(folder, "run", segment_bytes=segment_bytes) as archive:
        for entry in entries:
            archive.append([entry])


class Numbered(LogBuilder):
    """Entries of an episode say where its request stands, as those of workers do."""

    def __init__(self) -> None:
        super().__init__()
        self._requested: dict[str, int] = {}

    def add(self, subject: str, message: Message) -> int:
        episode = subject.rpartition(".")[2]
        if isinstance(message, EpisodeRequested):
            self._requested[episode] = len(self.entries) + 1
        elif isinstance(message, AttemptStarted | Observation | EpisodeFinished):
            message = msgspec.structs.replace(message, request_sequence=self._requested[episode])
        return super().add(subject, message)


def build_run(steps: int = 12) -> LogBuilder:
    """Every step trains two episodes and then raises the floor behind them."""
    log = Numbered()
    log.lineage()
    log.version()
    for step in range(1, steps + 1):
        names = [f"s{step}e{index}" for index in range(2)]
        for name in names:
            log.play(name)
        log.step(step, names)
        log.version(step)
        end = log.checkpoint(step, floor=len(log.entries) + 1)
        log.add(SUBJECTS.floor, FloorRaised(sequence=end))
    return log


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    archive_log(tmp_path / "archive", read_entries(build_run()))
    return tmp_path / "archive"


def test_killed_between_any_two_files_the_archive_begins_where_the_note_says_and_the_next_removal_ends_it(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = parse_first_sequence(list_segments(archive)[5])
    unlink = Path.unlink

    third = list_segments(archive)[2]

    def kill(self: Path, **options: Any) -> None:
        if self == third:
            raise KeyboardInterrupt
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", kill)
    with pytest.raises(KeyboardInterrupt):
        remove_segments(archive, below)
    monkeypatch.undo()
    assert parse_first_sequence(list_segments(archive)[0]) < below
    assert next(read_archive(archive)).sequence == below
    keeper = ArchiveKeeper(archive, ArchiveSettings())  # limits may be taken back meanwhile
    keeper.begin()
    assert parse_first_sequence(list_segments(archive)[0]) == below
    assert remove_segments(archive, below) == 0


def test_nothing_leaves_before_the_note_is_there(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_segments(archive)

    def kill(file: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(archive_retention, "replace_synced", kill)
    with pytest.raises(KeyboardInterrupt):
        remove_segments(archive, parse_first_sequence(before[3]))
    assert list_segments(archive) == before
    assert next(read_archive(archive)).sequence == 1


def test_the_note_is_not_read_for_each_segment(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_segments(archive, parse_first_sequence(list_segments(archive)[2]))
    noted, reads = read_removed(archive), []

    def read(folder: Path) -> archive_retention.Removed:
        reads.append(folder)
        return noted

    monkeypatch.setattr(archive_retention, "read_removed", read)
    assert remove_segments(archive, noted.below) == 0
    assert len(reads) <= 2 < len(list_segments(archive))


def test_a_segment_that_is_only_begun_does_not_count_so_that_the_one_before_it_stays(archive: Path) -> None:
    last = read_entries(build_run())[-1].sequence
    build_segment_path(archive, last + 1).write_bytes(encode_segment_start("run", last + 1))
    assert describe_segments(archive)[-1].first <= last
    ArchiveKeeper(archive, ArchiveSettings(keep_bytes=1)).keep(now_ns=0, needed=1 << 40)
    assert [parse_first_sequence(each) for each in list_kept_segments(archive)][-1] == last + 1
    with open_archive(archive, "run") as again:
        assert again.last_sequence == last


def test_who_reads_while_segments_leave_is_told_to_repeat_it_and_a_lost_segment_is_no_removal(archive: Path) -> None:
    entries = read_archive(archive)
    next(entries)
    remove_segments(archive, parse_first_sequence(list_segments(archive)[4]))
    with pytest.raises(ArchiveShortened, match="was shortened to begin at entry"):
        list(entries)
    entries = read_archive(archive)
    next(entries)
    list_segments(archive)[1].unlink()
    with pytest.raises(FileNotFoundError):
        list(entries)


def test_a_note_that_cannot_be_read_is_damage(archive: Path) -> None:
    (archive / NOTE).write_text("{")
    with pytest.raises(ArchiveDamaged, match="cannot be read"):
        list(read_archive(archive))


@pytest.mark.integration
async def test_the_audit_of_what_is_left_has_no_finding_at_any_begin_and_never_balances(archive: Path) -> None:
    for segment in list_segments(archive)[1:]:
        remove_segments(archive, parse_first_sequence(segment))
        report = await audit_archive(SUBJECTS, archive)
        assert kinds(report) == {}, segment.name
        assert not report.balanced
        assert report.begins == parse_first_sequence(segment)
        assert report.unproven[0].startswith(f"anything of entries 1 to {report.begins - 1}, which")
        assert report.lineages == ("l1",)


async def test_segments_that_are_gone_without_a_note_are_missing(archive: Path) -> None:
    first, second, third = list_segments(archive)[:3]
    first.unlink()
    assert "entries_missing" in kinds(await audit_archive(SUBJECTS, archive))
    remove_segments(archive, parse_first_sequence(second))
    second.unlink()  # and so is one that the note does not name
    assert parse_first_sequence(third) > read_removed(archive).below
    assert "entries_missing" in kinds(await audit_archive(SUBJECTS, archive))


FORGED = {
    "trained_twice": lambda log: log.step(13, ["new"]) and log.step(14, ["new"]),
    "version_unpublished": lambda log: log.act("open", 0, version=99),
    "step_out_of_order": lambda log: log.step(15, []),
    "lineage_replaced": lambda log: log.step(13, [], lineage="l9"),
    "version_repeated": lambda log: log.version(12),
}


@pytest.mark.parametrize("kind", FORGED)
async def test_what_is_wrong_with_the_rest_is_found_in_it(tmp_path: Path, kind: str) -> None:
    log = build_run()
    log.play("new")
    log.request("open")
    log.claim("open")
    log.observe("open", 0)
    FORGED[kind](log)
    archive_log(tmp_path, read_entries(log))
    remove_segments(tmp_path, max(parse_first_sequence(each) for each in list_segments(tmp_path)[:-6]))
    assert kind in kinds(await audit_archive(SUBJECTS, tmp_path))


async def audit_with_state(log: LogBuilder, archive: Path, state: Path) -> Report:
    async with MemoryServer().connect("run") as bus:
        await bus.declare(plan_run("run", lanes=1))
        for subject, payload in log.entries:
            await bus.publish(subject, payload)
        entries = [entry async for entry in bus.scan([SUBJECTS.log])]
        shutil.rmtree(archive, ignore_errors=True)
        archive_log(archive, entries)
        first = await audit_run(bus, SUBJECTS, archive=archive, state=state)
        assert first.balanced
        remove_segments(archive, parse_first_sequence(list_segments(archive)[-1]))
        with pytest.raises(UserError, match=r"goes up to entry 5 .* retention removed what lies between"):
            edited = state.with_name("old")
            await bus.purge(SUBJECTS.log, below=6)
            await write_old_state(edited, entries)
            await audit_run(bus, SUBJECTS, archive=archive, state=edited)
        return await audit_run(bus, SUBJECTS, archive=archive, state=state)


async def write_old_state(file: Path, entries: list[StreamEntry]) -> None:
    from fleetbus.audit.run import enter
    from fleetbus.audit.state import LogPosition, write_audit_state
    from fleetbus.core.audit.books import Audit

    audit = Audit()
    for entry in entries[:5]:
        enter(audit, entry)
    write_audit_state(file, "run", audit, LogPosition.of(entries[4]))


async def test_an_audit_that_keeps_its_books_proves_the_whole_run_and_one_that_comes_too_late_is_refused(
    tmp_path: Path,
) -> None:
    report = await audit_with_state(build_run(), tmp_path / "archive", tmp_path / "books")
    assert report.balanced
    assert report.books.trained == 24


def test_segments_are_small_enough_for_the_limits() -> None:
    assert compute_segment_limits(ArchiveSettings(), 1 << 26).size_bytes == 1 << 26
    assert compute_segment_limits(ArchiveSettings(keep_bytes=1 << 27), 1 << 26).size_bytes == 1 << 24
    assert compute_segment_limits(ArchiveSettings(keep_hours=8.0)).seconds == 3600
    assert compute_segment_limits(ArchiveSettings(store="memory://x")).seconds == 600


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (ArchiveSettings(store="bucket"), "recorder.store = bucket: use a URL"),
        (ArchiveSettings(store="ftp://me:secret@host/x"), "must not contain a password"),
        (ArchiveSettings(store_keep_hours=1.0), "limit what lies in recorder.store: give that, too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: ArchiveSettings, line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_configuration(Configuration(recorder=settings))


def test_what_a_learner_may_begin_with_is_needed_and_nothing_before_it() -> None:
    retention, sequence = Retention(), 0

    def enter(subject: str, message: Any) -> int:
        nonlocal sequence
        sequence += 1
        retention.enter(sequence, subject, message)
        return sequence

    enter(SUBJECTS.train("default"), LineageStarted(lineage="l1", worker="w"))
    checkpoints, versions = [], []
    for step in range(1, 2 * KEPT_CHECKPOINTS):
        published = PolicyPublished(policy="default", version=step, lineage="l1", step=step, uri="", manifest=(), size_bytes=0)
        stored = CheckpointStored(lineage="l1", step=step, version=step, file="f", floor=sequence)
        checkpoints.append((enter(SUBJECTS.train("default"), stored), stored.floor))
        versions.append(enter(SUBJECTS.policy("default"), published))
        assert retention.find_archive_floor() == 0, "nothing is below the floor yet"
    enter(SUBJECTS.floor, FloorRaised(sequence=sequence + 1))
    oldest, floor = checkpoints[-KEPT_CHECKPOINTS]
    assert retention.find_archive_floor() == min(oldest, floor, versions[-KEPT_VERSIONS]) > 1
