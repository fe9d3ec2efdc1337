"""The small files of a run: a crash leaves them whole, and what cannot be read or written is one line."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_writer import open_archive
from fleetbus_workers.up.identity import build_identity, check_identity, write_identity


def test_a_run_whose_identity_cannot_be_read_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for content in (b"", b'{"model": "', b"[]", b"{}"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"run\.json .*--run"):
            check_identity(file, build_identity(Configuration()), {})


def test_an_identity_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_identity(file, build_identity(Configuration()))
    assert list(tmp_path.iterdir()) == []
    write_identity(file, build_identity(Configuration()))
    check_identity(file, build_identity(Configuration()), {})
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        ("user=http://a:1", "user=m@http://b:2", True),
        ("a=train\nb=p", "b=p\na=train:m", True),
        ("user=train", "", False),
        ("user=train", "user=http://a:1", False),
        ("", "second=league:newest", False),
    ],
)
def test_a_run_goes_on_with_the_seats_that_it_began_with(tmp_path: Path, before: str, now: str, is_same: bool) -> None:
    """A server may have moved; a policy that was trained and is not any more would leave its learner's half of the log."""
    file = tmp_path / "run.json"
    write_identity(file, build_identity(Configuration(run=RunSettings(seats=before))))
    wanted = build_identity(Configuration(run=RunSettings(seats=now)))
    if is_same:
        check_identity(file, wanted, {})
    else:
        with pytest.raises(UserError, match="this run was started with seats"):
            check_identity(file, wanted, {})
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), "seats": None}))
    check_identity(file, wanted, {})


def test_an_archive_where_none_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "archive", Path("/proc/nowhere")):
        with pytest.raises(UserError, match="--archive"), open_archive(folder, "run"):
            pass
