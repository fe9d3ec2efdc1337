"""``fleetbus audit --state FILE``: what was proven once is not read again, and a file that is not of this log is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.audit import state as audit_state
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import SUBJECTS, LogBuilder, start_log
from tests.support.servers import connect, run_server

RUN = SUBJECTS.run
NO_TEXT = b"\x81\xa7version\xa2\xff\xff"


class Served:
    """A server with one run whose log is built here, beside the synchronous test."""

    def __init__(self, server: NatsServerProcess, portal: BlockingPortal) -> None:
        self.url = server.url
        self._call = portal.call
        self.log = start_log()
        self._stored = 0

    def store(self) -> None:
        """What was added to the log since."""
        self._call(self._store)

    def begin_again(self, log: LogBuilder) -> None:
        """Another log of the same name."""
        self._call(self._remove)
        self.log, self._stored = log, 0
        self.store()

    def trim(self) -> None:
        self._call(self._trim)

    async def _store(self) -> None:
        async with connect(self.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            for subject, payload in self.log.entries[self._stored :]:
                await bus.publish(subject, payload)
        self._stored = len(self.log.entries)

    async def _remove(self) -> None:
        async with connect(self.url, run=RUN) as bus:
            await cast(Any, bus).remove_run(RUN)

    async def _trim(self) -> None:
        async with connect(self.url, run=RUN) as bus:
            await bus.purge(SUBJECTS.log, below=(await bus.log_state()).last_sequence)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(tmp_path / "nats")) as server:
        yield Served(server, portal)


@pytest.fixture
def audit(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return partial(run_audit, url=served.url)


def run_audit(*arguments: str, url: str) -> int:
    return run_program(["audit", RUN, "--nats", url, *arguments])


def audit_module() -> Any:
    from fleetbus.audit import run as audit

    return audit


def play_step(log: LogBuilder, step: int) -> None:
    names = [f"s{step}e{index}" for index in range(3)]
    for name in names:
        log.play(name)
    log.step(step, names[:2], {names[2]: "stale"})
    log.version(step)
    log.checkpoint(step)


def read_report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_an_audit_goes_on_where_the_last_one_ended(
    served: Served, audit: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    enter = audit_module().enter

    def count(books: Any, entry: Any) -> None:
        read.append(entry.sequence)
        enter(books, entry)

    monkeypatch.setattr(audit_module(), "enter", count)
    for step in range(1, 4):
        play_step(served.log, step)
        served.log.request(f"open{step}")
        served.log.claim(f"open{step}")
        served.store()
        read.clear()
        assert audit("--state", "books", "--json") == 0
        continued = read_report(capsys)
        assert len(read) < len(served.log.entries) / step + 9, "each entry is read once"
        assert audit("--json") == 0
        assert continued == read_report(capsys)
    assert audit("--state", "books", "--json") == 0, "nothing is new"
    assert continued == read_report(capsys)


def test_what_is_wrong_stays_wrong_and_what_was_only_open_does_not(
    served: Served, audit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    play_step(served.log, 1)
    served.log.step(2, ["s1e0", "later"])
    served.store()
    assert audit("--state", "books", "--json") == 1
    kinds = {finding["kind"] for finding in read_report(capsys)["findings"]}
    assert kinds >= {"trained_twice", "never_requested", "trained_without_result"}
    play_step(served.log, 3)
    served.store()
    assert audit("--state", "books", "--json") == 1
    continued = read_report(capsys)
    assert audit("--json") == 1
    assert continued == read_report(capsys)


def test_the_state_of_another_log_is_refused(served: Served, audit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play_step(served.log, 1)
    served.store()
    assert audit("--state", "books") == 0
    kept = Path("books").read_bytes()
    other = start_log()
    for step in (1, 2):
        play_step(other, step)
    served.begin_again(other)
    assert audit("--state", "books") == 2
    error = capsys.readouterr().err
    assert "is not that of the state: the log went back in time, or is another" in error and error.count("\n") == 1
    assert Path("books").read_bytes() == kept


def test_the_state_of_a_log_that_went_back_in_time_is_refused(
    served: Served, audit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        play_step(served.log, step)
    served.store()
    assert audit("--state", "books") == 0
    served.log.entries = served.log.entries[:10]
    served.begin_again(served.log)
    assert audit("--state", "books") == 2
    assert "the log went back in time, or is another" in capsys.readouterr().err


def test_a_state_whose_last_entry_was_trimmed_asks_for_the_archive(
    served: Served, audit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    play_step(served.log, 1)
    served.store()
    assert audit("--state", "books") == 0
    play_step(served.log, 2)
    served.store()
    served.trim()
    assert audit("--state", "books") == 2
    assert "was trimmed: give --archive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("torn", "is damaged: remove it"),
        ("flipped", "is damaged: remove it"),
        ("no state", "is not the state of an audit"),
        ("newer", "was written by fleetbus 99.0, and this is"),
        ("older books", f"was written by fleetbus {version('fleetbus')}, and this is"),
        ("other run", "is of run other: give another --state"),
        ("other fields", "cannot be read"),
        ("no position", "cannot be read"),
        ("no text", "cannot be read"),
    ],
)
def test_a_file_that_is_no_whole_state_of_this_run_is_refused(
    served: Served, audit: Any, capsys: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    served.store()
    assert audit("--state", "books") == 0
    file = Path("books")
    content = file.read_bytes()
    state = msgspec.msgpack.decode(content[len(audit_state._MAGIC) + 32 :], type=audit_state.AuditState)
    changes: dict[str, dict[str, Any]] = {
        "newer": {"version": "99.0"},
        "older books": {"version": version("fleetbus")},
        "other run": {"run": "other"},
        "no position": {"position": msgspec.structs.replace(state.position, sequence=-1)},
        "other fields": {"books": msgspec.msgpack.encode({"_counts": 1})},
    }
    match fault:
        case "torn":
            file.write_bytes(content[:-1])
        case "flipped":
            file.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        case "no state":
            file.write_text("{}")
        case "no text":
            file.write_bytes(audit_state._MAGIC + hashlib.sha256(NO_TEXT).digest() + NO_TEXT)
        case _:
            body = msgspec.msgpack.encode(msgspec.structs.replace(state, **changes[fault]))
            file.write_bytes(audit_state._MAGIC + hashlib.sha256(body).digest() + body)
    kept = file.read_bytes()
    assert audit("--state", "books") == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1
    assert file.read_bytes() == kept


@pytest.mark.parametrize("place", ["pipe", "/dev/zero"])
def test_what_has_no_end_is_no_state(served: Served, audit: Any, capsys: pytest.CaptureFixture[str], place: str) -> None:
    served.store()
    os.mkfifo("pipe")
    assert audit("--state", place) == 2
    assert "is no regular file: give another --state" in capsys.readouterr().err


def test_a_link_to_a_state_stays_a_link(served: Served, audit: Any) -> None:
    served.store()
    os.mkdir("disk")
    os.symlink("disk/books", "books")
    assert audit("--state", "books") == audit("--state", "books") == 0
    assert os.path.islink("books") and os.listdir("disk") == ["books"]


def test_a_state_is_only_for_the_log_of_a_run(
    served: Served, audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.store()
    assert audit("--state", "books", "--deep") == 2
    assert "--deep reads all of it: leave it out" in capsys.readouterr().err
    assert audit("--state", "nowhere/books") == 2
    assert "cannot write nowhere/books" in capsys.readouterr().err
    assert not (tmp_path / "books").exists()
