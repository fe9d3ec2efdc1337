"""The archive's files: what is synced is read back, what a crash tore off is cut, and damage is never taken for a tear."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.archive_format import (
    BEGUN,
    MAGIC,
    MAX_RECORD_BYTES,
    ArchiveDamaged,
    ArchivedEntry,
    build_segment_path,
    encode_frame,
    is_damage,
    list_segments,
    read_header,
)
from fleetbus.log.archive_reader import read_archive, read_archived_entries
from fleetbus.log.archive_writer import open_archive
from fleetbus.recording import load_recording


def entries(first: int, last: int, size: int = 20) -> list[StreamEntry]:
    return [
        StreamEntry(
            subject=f"fb.run.task.default.e{number}", payload=bytes([number % 256]) * size, sequence=number, time_ns=number
        )
        for number in range(first, last + 1)
    ]


def written(folder: Path, first: int, last: int, *, segment_bytes: int = 1 << 20) -> None:
    with open_archive(folder, "run", segment_bytes=segment_bytes) as archive:
        archive.append(entries(first, last))


def test_what_is_archived_is_read_back_in_order_and_from_any_start(tmp_path: Path) -> None:
    written(tmp_path, 1, 50)
    written(tmp_path, 51, 80)
    assert list(read_archive(tmp_path)) == entries(1, 80)
    assert list(read_archive(tmp_path, run="run", start=33)) == entries(33, 80)
    assert list(read_archive(tmp_path, start=81)) == []


def test_long_archives_are_cut_into_segments_and_read_as_one(tmp_path: Path) -> None:
    written(tmp_path, 1, 500, segment_bytes=2000)
    written(tmp_path, 501, 600, segment_bytes=2000)
    assert len(list_segments(tmp_path)) >= 5
    assert list(read_archive(tmp_path)) == entries(1, 600)
    assert list(read_archive(tmp_path, start=555)) == entries(555, 600)


def test_single_entries_are_found_by_their_positions(tmp_path: Path) -> None:
    written(tmp_path, 1, 100, segment_bytes=500)
    found = read_archived_entries(tmp_path, {7, 55, 90, 400}, run="run")
    assert sorted(found) == [7, 55, 90]
    assert [found[55]] == entries(55, 55)
    assert read_archived_entries(tmp_path, set()) == {}


@pytest.mark.parametrize("torn_bytes", range(1, 22, 4))
def test_a_torn_tail_is_cut_when_the_archive_is_opened_again(tmp_path: Path, torn_bytes: int) -> None:
    written(tmp_path, 1, 9)
    (segment,) = list_segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-torn_bytes])
    assert list(read_archive(tmp_path)) == entries(1, 8)
    with open_archive(tmp_path, "run") as archive:
        assert archive.last_sequence == 8
        archive.append(entries(9, 12))
    assert list(read_archive(tmp_path)) == entries(1, 12)


def write_as_before(folder: Path, first: int, last: int) -> None:
    """A segment of format 1, whose entries stand there as they are."""
    header = msgspec.msgpack.encode({"run": "run", "format": 1, "first": first})
    plain = [ArchivedEntry(each.sequence, each.time_ns, each.subject, each.payload) for each in entries(first, last)]
    records = b"".join(encode_frame(msgspec.msgpack.encode(each)) for each in plain)
    build_segment_path(folder, first).write_bytes(MAGIC + encode_frame(header) + records)


def test_an_archive_of_before_is_read_and_goes_on_in_a_segment_of_its_own(tmp_path: Path) -> None:
    write_as_before(tmp_path, 1, 9)
    before = list_segments(tmp_path)[0].read_bytes()
    with open_archive(tmp_path, "run") as archive:
        assert archive.last_sequence == 9
        archive.append(entries(10, 20))
    written(tmp_path, 21, 30)
    assert list(read_archive(tmp_path)) == entries(1, 30)
    assert len(list_segments(tmp_path)) == 2
    assert list_segments(tmp_path)[0].read_bytes() == before


def test_the_torn_tail_of_an_archive_of_before_is_cut(tmp_path: Path) -> None:
    write_as_before(tmp_path, 1, 9)
    (segment,) = list_segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-3])
    written(tmp_path, 9, 12)
    assert list(read_archive(tmp_path)) == entries(1, 12)


def test_a_run_in_an_archive_takes_about_as_much_as_in_a_recording(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "replay" / "recordings" / "warehouse.fbrec"
    stored = list(load_recording(file).entries)
    with open_archive(tmp_path, "run") as archive:
        for entry in stored:  # batches of one, as where nothing is in a hurry
            archive.append([entry])
    assert list(read_archive(tmp_path)) == stored
    size = sum(segment.stat().st_size for segment in list_segments(tmp_path))
    assert size < 1.2 * file.stat().st_size
    assert size < sum(len(entry.payload) for entry in stored) / 4


def test_a_record_that_grows_without_end_is_damage(tmp_path: Path) -> None:
    written(tmp_path, 1, 3)
    (segment,) = list_segments(tmp_path)
    machine = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = machine.compress(bytes(4 * MAX_RECORD_BYTES)) + machine.flush(zlib.Z_SYNC_FLUSH)
    with segment.open("ab") as file:
        file.write(encode_frame(BEGUN + bomb))
    written(tmp_path, 4, 6)
    assert list(read_archive(tmp_path)) == entries(1, 6)


def test_what_a_killed_recorder_had_not_synced_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may leave the log as soon as it counts, and a loss of power would take the only copy."""
    written(tmp_path, 1, 9)
    (segment,) = list_segments(tmp_path)
    synced, sync = set(), os.fsync

    def note_and_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    with open_archive(tmp_path, "run") as archive:
        assert archive.last_sequence == 9
        assert synced == {segment.stat().st_ino, tmp_path.stat().st_ino}


@pytest.mark.parametrize("room", [0, 5, 300, 700])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_an_append_that_found_no_room_is_repeated_after_its_remains_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, segment_bytes: int
) -> None:
    write = os.write
    with open_archive(tmp_path, "run", segment_bytes=segment_bytes) as archive:
        archive.append(entries(1, 9))

        def write_while_there_is_room(descriptor: int, data: bytes) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = write(descriptor, data[:room])
            room -= count
            return count

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "write", write_while_there_is_room)
            archive.append(entries(10, 60))
        archive.recover()
        archive.append(entries(archive.last_sequence + 1, 70))
    assert list(read_archive(tmp_path)) == entries(1, 70)


def test_garbage_after_the_last_record_is_cut(tmp_path: Path) -> None:
    written(tmp_path, 1, 9)
    (segment,) = list_segments(tmp_path)
    with segment.open("ab") as file:
        file.write(bytes(4096))
    written(tmp_path, 10, 12)
    assert list(read_archive(tmp_path)) == entries(1, 12)


@pytest.mark.parametrize("left_bytes", [0, 5, 20])
def test_a_segment_that_was_only_begun_is_begun_again(tmp_path: Path, left_bytes: int) -> None:
    written(tmp_path, 1, 9, segment_bytes=1)
    newest = list_segments(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:left_bytes])
    with open_archive(tmp_path, "run", segment_bytes=1) as archive:
        assert archive.last_sequence == 8
        archive.append(entries(9, 10))
    assert list(read_archive(tmp_path)) == entries(1, 10)


def test_an_archive_that_lost_what_the_log_no_longer_has_is_damaged_and_left_alone(tmp_path: Path) -> None:
    written(tmp_path, 1, 9)
    with open_archive(tmp_path, "run") as archive:
        archive.guard(7)
    (segment,) = list_segments(tmp_path)
    torn = segment.read_bytes()[:-200]
    segment.write_bytes(torn)
    with (
        pytest.raises(ArchiveDamaged, match=r"ends at entry \d, but the log was trimmed up to 7"),
        open_archive(tmp_path, "run"),
    ):
        pass
    assert segment.read_bytes() == torn


def test_a_segment_that_lost_all_that_was_trimmed_is_not_removed(tmp_path: Path) -> None:
    written(tmp_path, 1, 9, segment_bytes=1)
    with open_archive(tmp_path, "run") as archive:
        archive.guard(9)
    newest = list_segments(tmp_path)[-1]
    newest.write_bytes(b"")
    with pytest.raises(ArchiveDamaged), open_archive(tmp_path, "run"):
        pass
    assert newest.exists()


def test_damage_before_the_newest_segment_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    written(tmp_path, 1, 100, segment_bytes=1000)
    first = list_segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(bytes(data))
    with pytest.raises(ArchiveDamaged, match="is damaged at byte"):
        list(read_archive(tmp_path))


def test_an_archive_that_ends_before_what_the_log_was_trimmed_of_is_read_as_damaged(tmp_path: Path) -> None:
    written(tmp_path, 1, 100, segment_bytes=1000)
    with open_archive(tmp_path, "run") as archive:
        archive.guard(98)
        archive.append(entries(101, 102))
    list_segments(tmp_path)[-1].unlink()
    for start in (1, 97, 200):
        with pytest.raises(ArchiveDamaged, match=r"ends at entry \d\d, but the log was trimmed up to 98: restore"):
            list(read_archive(tmp_path, start=start))
    for segment in list_segments(tmp_path):
        segment.unlink()
    with pytest.raises(ArchiveDamaged, match="ends at entry 0"):
        list(read_archive(tmp_path))


def test_a_segment_that_was_only_begun_behind_what_was_trimmed_is_no_damage(tmp_path: Path) -> None:
    written(tmp_path, 1, 10, segment_bytes=1)
    with open_archive(tmp_path, "run") as archive:
        archive.guard(9)
    list_segments(tmp_path)[-1].write_bytes(b"")
    assert list(read_archive(tmp_path)) == entries(1, 9)
    assert list(read_archive(tmp_path, start=10)) == []


@pytest.mark.parametrize("offset", [3, 11, 60, 200, 500])
def test_a_flipped_byte_in_the_newest_segment_that_whole_records_follow_is_damage_and_no_torn_tail(
    tmp_path: Path, offset: int
) -> None:
    written(tmp_path, 1, 100)
    (segment,) = list_segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[offset] ^= 0x10
    segment.write_bytes(bytes(data))
    with pytest.raises(ArchiveDamaged, match="is damaged at byte"):
        list(read_archive(tmp_path))


def test_a_record_that_is_written_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    written(tmp_path, 1, 100)
    (segment,) = list_segments(tmp_path)
    assert not is_damage(segment, 0)
    with segment.open("rb") as file:
        read_header(file, segment, "run")
        assert not is_damage(segment, file.tell())


def test_an_archive_is_of_one_run(tmp_path: Path) -> None:
    written(tmp_path, 1, 3)
    with pytest.raises(UserError, match="is the archive of run run, not of other"):
        list(read_archive(tmp_path, run="other"))
    with pytest.raises(UserError, match="not of other"), open_archive(tmp_path, "other"):
        pass


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    with (
        open_archive(tmp_path, "run"),
        pytest.raises(UserError, match="being written by another recorder"),
        open_archive(tmp_path, "run"),
    ):
        pass


def test_a_folder_without_an_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no archive"):
        list(read_archive(tmp_path))
