"""An archive's copies in a store: one that lies is found, and a folder that was lost goes on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.config.settings import ArchiveSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_format import ArchiveDamaged, list_segments, parse_first_sequence
from fleetbus.log.archive_reader import read_archive
from fleetbus.log.archive_retention import NOTE, read_removed
from fleetbus.log.archive_writer import open_archive
from fleetbus_workers.recorder import archive_keeper
from fleetbus_workers.recorder.archive_keeper import ArchiveKeeper
from fleetbus_workers.recorder.archive_places import open_archive_places
from fleetbus_workers.recorder.archive_store import ArchiveStore
from tests.support.log_builder import read_entries
from tests.unit.test_archive_retention import archive_log, build_run


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    archive_log(tmp_path / "archive", read_entries(build_run()))
    return tmp_path / "archive"


class Lying:
    """A file system that says that it has written, and lists what it was given."""

    def __init__(self, files: Any, how: str) -> None:
        self._files = files
        self._how = how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def put_file(self, source: str, target: str) -> None:
        content = Path(source).read_bytes()
        if self._how == "nothing is there":
            return
        self._files.pipe_file(target, content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"


def keep_in(store: Path, **settings: Any) -> ArchiveSettings:
    return ArchiveSettings(store=store.as_uri(), **settings)


@pytest.mark.integration
@pytest.mark.parametrize("how", ["nothing is there", "one bit is another"])
def test_a_store_that_lies_is_found_before_the_folder_loses_anything(archive: Path, store: Path, how: str) -> None:
    keeper = ArchiveKeeper(archive, keep_in(store, keep_bytes=1))
    files = keeper._store._files  # type: ignore[union-attr]
    keeper._store._files = Lying(files, how)  # type: ignore[union-attr]
    before = list_segments(archive)
    for _ in range(3):
        keeper.keep(now_ns=0, needed=1 << 40)
    assert list_segments(archive) == before
    keeper._store._files = files  # type: ignore[union-attr]
    for _ in range(len(before)):
        keeper.keep(now_ns=0, needed=1 << 40)
    assert len(list_segments(archive)) == 1
    with open_archive_places((str(archive), store.as_uri())) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


@pytest.mark.integration
def test_a_long_archive_is_copied_and_shortened_in_parts(archive: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = len(list_segments(archive))
    ticks = itertools.count(0.0, 10.0)
    monkeypatch.setattr("fleetbus_workers.recorder.archive_store.time.monotonic", lambda: next(ticks))
    monkeypatch.setattr(archive_keeper, "MOST_LEAVING", 2)
    keeper = ArchiveKeeper(archive, keep_in(store, keep_bytes=1, store_keep_bytes=1))
    counts = []
    for _ in range(2 * segments):
        keeper.keep(now_ns=0, needed=1 << 40)
        counts.append((len(list_segments(archive)), len(list_segments(store))))
    assert counts[0] == (segments, 6)  # a minute's, by a clock that goes on by ten seconds each time
    assert counts[-1] == (1, 1)
    for before, after in itertools.pairwise(counts):
        assert before[0] - after[0] <= 2 and before[1] - after[1] <= 2


def test_a_store_has_limits_of_its_own_and_gets_nothing_again_that_it_let_go(
    archive: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = ArchiveKeeper(archive, keep_in(store, store_keep_bytes=1000))
    segments = len(list_segments(archive))
    keeper.keep(now_ns=0, needed=1 << 40, is_end=True)
    copied: list[Path] = []
    monkeypatch.setattr(keeper._store, "put", copied.append)
    keeper.keep(now_ns=0, needed=1 << 40, is_end=True)
    assert copied == []
    kept = list_segments(store)
    assert 0 < len(kept) < segments == len(list_segments(archive))
    assert sum(each.stat().st_size for each in kept) <= 1000
    with open_archive_places((store.as_uri(),)) as folder:
        assert next(read_archive(folder)).sequence == parse_first_sequence(kept[0])
        assert read_removed(folder).lineages == read_removed(store).lineages != ()


def test_a_folder_that_was_lost_goes_on_behind_the_newest_segment_of_the_store(archive: Path, store: Path) -> None:
    settings = keep_in(store)
    ArchiveKeeper(archive, settings).keep(now_ns=0, needed=0, is_end=True)
    newest = parse_first_sequence(list_segments(store)[-1])
    shutil.rmtree(archive)
    ArchiveKeeper(archive, settings).begin()
    with open_archive(archive, "run") as again:
        assert again.last_sequence == len(build_run().entries)
    assert next(read_archive(archive)).sequence == newest
    with open_archive_places((str(archive), store.as_uri())) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


def test_a_store_that_cannot_be_read_ends_a_recorder_that_has_nothing_to_go_on_with(tmp_path: Path, store: Path) -> None:
    store.mkdir()
    keeper = ArchiveKeeper(tmp_path / "archive", keep_in(store))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("403")

    keeper._store._files = type("Away", (), {"__getattr__": lambda *_: fail})()  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"recorder.store cannot be read, and .* 403: correct"):
        keeper.begin()


def test_what_a_killed_removal_left_in_the_store_does_not_count_and_leaves_with_the_next(archive: Path, store: Path) -> None:
    keeper = ArchiveKeeper(archive, keep_in(store, store_keep_bytes=1 << 30))
    keeper.keep(now_ns=0, needed=1 << 40, is_end=True)
    begins = parse_first_sequence(list_segments(store)[3])
    (store / NOTE).write_bytes(msgspec.json.encode({"below": begins}))
    assert ArchiveStore(store.as_uri()).describe_segments()[0].first == begins
    keeper.keep(now_ns=0, needed=1 << 40, is_end=True)
    assert parse_first_sequence(list_segments(store)[0]) == begins


def rot(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_segments_of_one_size_the_one_that_reads_further_is_taken(archive: Path, tmp_path: Path, is_first: bool) -> None:
    rotten = shutil.copytree(archive, tmp_path / "rotten")
    for segment in list_segments(rotten)[1:]:
        rot(segment)
    places = (str(rotten), str(archive))
    with open_archive_places(places if is_first else places[::-1]) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


def test_a_store_replaces_what_is_rotten_in_the_folder_and_the_folder_what_is_rotten_in_the_store(
    archive: Path, store: Path
) -> None:
    ArchiveKeeper(archive, keep_in(store)).keep(now_ns=0, needed=0, is_end=True)
    rot(list_segments(archive)[1])
    rot(list_segments(store)[2])
    with open_archive_places((str(archive), store.as_uri())) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


def test_what_the_log_was_trimmed_of_is_known_where_several_places_are_read(archive: Path, tmp_path: Path) -> None:
    older = shutil.copytree(archive, tmp_path / "older")
    last = len(build_run().entries)
    with open_archive(archive, "run") as writer:
        writer.guard(last)
    for folder in (archive, older):
        list_segments(folder)[-1].unlink()
    with (
        open_archive_places((str(archive), str(older))) as folder,
        pytest.raises(ArchiveDamaged, match=f"the log was trimmed up to {last}"),
    ):
        list(read_archive(folder))
