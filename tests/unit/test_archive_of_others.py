"""An archive that somebody else wrote, or changed: a command ends with a line about it, and it fills no memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log import archive_reader
from fleetbus.log.archive_format import MAGIC, EntryEncoder, build_segment_path, encode_frame, encode_segment_start
from fleetbus.log.archive_reader import read_archive, scan_archive
from fleetbus_workers.cli.program import run_program


def entry(sequence: int, subject: str = "fb.run.life.learner.w", payload: bytes = b"x") -> StreamEntry:
    return StreamEntry(sequence=sequence, time_ns=sequence, subject=subject, payload=payload)


def write_segment(folder: Path, entries: Sequence[StreamEntry], *, first: int = 1, rest: bytes = b"") -> Path:
    encode = EntryEncoder().encode
    segment = build_segment_path(folder, first)
    segment.write_bytes(encode_segment_start("run", first) + b"".join(map(encode, entries)) + rest)
    return segment


def deflate(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush(zlib.Z_SYNC_FLUSH)


def write_short_subject(folder: Path) -> None:
    write_segment(folder, [entry(1, "fb")])


def write_subject_without_name(folder: Path) -> None:
    write_segment(folder, [entry(1, "fb.run.task")])


def write_no_entry(folder: Path) -> None:
    write_segment(folder, [entry(1)], rest=encode_frame(b"\1" + deflate(b"\xc1")))


def write_no_header(folder: Path) -> None:
    build_segment_path(folder, 1).write_bytes(MAGIC + encode_frame(b"\xc1"))


def write_out_of_order(folder: Path) -> None:
    write_segment(folder, [entry(2), entry(1)])


def write_beginning_in_the_middle(folder: Path) -> None:
    write_segment(folder, [entry(1), entry(2)])
    write_segment(folder, [entry(2)], first=2)


def write_odd_note(folder: Path) -> None:
    write_segment(folder, [entry(9)], first=9)
    (folder / "removed.json").write_bytes(b'{"below":9,"lineages":[[3,3,"fb","eA=="]]}')


def write_deep_note(folder: Path) -> None:
    write_segment(folder, [entry(1)])
    (folder / "removed.json").write_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


HOSTILE = [
    write_short_subject,
    write_subject_without_name,
    write_no_entry,
    write_no_header,
    write_out_of_order,
    write_beginning_in_the_middle,
    write_odd_note,
    write_deep_note,
]


@pytest.mark.parametrize("is_url", [False, True], ids=["folder", "store"])
@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: str(write.__name__))
def test_what_no_recorder_wrote_is_refused_in_a_line(
    write: Callable[[Path], None],
    is_url: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "archive"
    folder.mkdir()
    write(folder)
    status = run_program(["audit", "run", "--archive", folder.as_uri() if is_url else str(folder)])
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1), error


def test_a_file_whose_name_only_looks_like_a_number_is_no_segment(tmp_path: Path) -> None:
    write_segment(tmp_path, [entry(1)]).with_name("²" + ".fbarchive").write_bytes(b"")
    (tmp_path / "²").with_suffix(".fbarchive").write_bytes(b"")
    assert [each.sequence for each in read_archive(tmp_path)] == [1]


@pytest.mark.integration
async def test_entries_that_expand_a_thousandfold_wait_in_memory_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segment(tmp_path, [entry(number, payload=bytes(1 << 20)) for number in range(1, 101)])
    waiting: list[int] = []
    read_batch = archive_reader._read_batch

    def read_and_count(entries: object) -> list[StreamEntry]:
        batch = read_batch(entries)  # type: ignore[arg-type]
        waiting.append(sum(len(each.payload) for each in batch))
        return batch

    monkeypatch.setattr(archive_reader, "_read_batch", read_and_count)
    assert len([each async for each in scan_archive(tmp_path)]) == 100
    assert max(waiting) <= 17 << 20


def test_a_segment_with_the_entries_of_another_run_is_refused_as_before(tmp_path: Path) -> None:
    write_segment(tmp_path, [entry(1)])
    with pytest.raises(UserError, match="is the archive of run run, not of other"):
        list(read_archive(tmp_path, run="other"))
