"""Folders of keys on disks that refuse: one clear line, nothing half written, and no part that stays."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.bus.streams import plan_run
from fleetbus.secret_files import create_secret_file
from fleetbus_workers.cli.program import run_program

COMMANDS = (("rotate", "learner"), ("revoke", "learner"), ("renew",))


@pytest.fixture
def keys(tmp_path: Path) -> AuthFolder:
    folder = AuthFolder(tmp_path / "keys")
    write_folder(folder, [plan_run("default", lanes=1)], hosts=["127.0.0.1"], days=1)
    return folder


def refuse(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def list_contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith(".next")}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("module", "call", "number", "said"),
    [
        (os, "fsync", errno.EIO, "cannot write"),
        (os, "fsync", errno.ENOSPC, "cannot write"),
        (os, "replace", errno.EIO, "cannot write"),
        (fcntl, "flock", errno.ENOLCK, "cannot be locked"),
        (fcntl, "flock", errno.ENOSYS, "cannot be locked"),
    ],
)
def test_a_disk_that_refuses_is_named_in_one_line_and_every_file_is_as_it_was(
    keys: AuthFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    module: Any,
    call: str,
    number: int,
    said: str,
) -> None:
    before = list_contents(keys.path)
    with monkeypatch.context() as patched:
        patched.setattr(module, call, refuse(number))
        assert run_program(["auth", command[0], str(keys.path), *command[1:]]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and said in told and os.strerror(number) in told
    assert list_contents(keys.path) == before
    assert run_program(["auth", command[0], str(keys.path), *command[1:]]) == 0


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_folder_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    folder = tmp_path / "keys"
    assert run_program(["auth", "init", str(folder)]) == 0
    seed = AuthFolder(folder).key("default", "learner").read_bytes()
    assert not create_secret_file(AuthFolder(folder).key("default", "learner"), b"another")
    assert run_program(["auth", "rotate", str(folder), "learner"]) == 0
    assert AuthFolder(folder).key("default", "learner").read_bytes() != seed
    assert not list(folder.glob("*.part"))
    assert all(file.stat().st_mode & 0o77 == 0 for file in folder.glob("*.nk"))
