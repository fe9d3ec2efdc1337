"""The small files of a run: a crash leaves them whole, and what cannot be read or written is one line."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_writer import open_archive
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.run_access.server_address import find_local_server_url
from fleetbus_workers.run_access.sources import find_monitor_address
from fleetbus_workers.up import run as up_run
from fleetbus_workers.up import viewer_server
from fleetbus_workers.up.identity import build_identity, check_identity, write_identity
from fleetbus_workers.up.lock import lock_run


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


@pytest.mark.parametrize("content", ['"x"', "[]", "7", '{"url": 7}', "{}", '{"url": "nats://', "", "\xff"])
def test_a_damaged_address_is_that_of_no_server(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration = Configuration(run=RunSettings(name="r", folder=str(tmp_path)))
    folder = run_folder(configuration.run)
    folder.path.mkdir()
    for file in (folder.server, viewer_server.address_file(folder)):
        file.write_bytes(content.encode("latin-1"))
    assert find_local_server_url(folder) == "" and find_monitor_address(configuration) == ""
    with lock_run(viewer_server.server_lock(folder), "r"):
        assert viewer_server.read_address(folder) == ""
    assert run_program(["top", "r", "--once", "--run-folder", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no server for run r" in line


@pytest.mark.parametrize("content", ['"x"', '{"url": "nats://', '{"url": "nats://127.0.0.1"}'])
def test_up_refuses_a_damaged_address_of_its_own_server(content: str, tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text(content)
    with pytest.raises(UserError, match=r"server\.json holds no address of a server"):
        up_run._read_address(tmp_path / "server.json")
