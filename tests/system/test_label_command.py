"""`fleetbus label` against real servers: what it stores, whose key may, and that audit and replay are the same with labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from fleetbus.auth.folder import AuthFolder
from fleetbus.bus.base import StreamEntry
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus.recording.reader import read_header
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import EpisodeLabeled, EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.cli.program import run_program
from tests.support.secured_server import TRUST, SecuredServer, secured_server
from tests.support.servers import connect, run_server

pytestmark = pytest.mark.integration

RECORDING = Path(__file__).parents[1] / "replay" / "recordings" / "warehouse.fbrec"
S = Subjects("books")
REQUEST = EpisodeRequested(
    episode_id="a", group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default", deadline_ns=1
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)

    async def request(server: NatsServerProcess) -> None:
        async with connect(server.url, run="books") as bus:
            await bus.declare(plan_run("books", lanes=1))
            await bus.publish(S.task("default", "a"), encode(REQUEST))

    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(run_server(tmp_path / "nats")) as server:
            portal.call(request, server)
            yield lambda *arguments: run_program([*arguments, "--nats", server.url])


def test_a_label_is_stored_shown_found_recorded_and_taken_off(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("audit", "books", "--json") == 0
    before = json.loads(capsys.readouterr().out)
    assert program("label", "books", "a", "--add", "odd", "--turn", "0", "--comment", "token=hf_abcdefghijklmnopqrst") == 0
    assert program("label", "books", "a", "--add", "good", "--author", "Ada") == 0
    assert capsys.readouterr().out == "a: odd, 1 comment\na: odd good, 1 comment\n"
    assert program("episodes", "books", "a") == 0
    shown = capsys.readouterr().out
    assert "labels: odd (turn 0), good" in shown and "hf_abcdefghijklmnopqrst" in shown
    assert program("episodes", "books", "--label", "odd", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["labels"], len(row["comments"])) == (["odd", "good"], 1)
    assert program("episodes", "books", "--label", "bad") == 0
    assert "0 of 1 episodes" in capsys.readouterr().out
    assert program("record", "books", "--episode", "a", "-o", "a.fbrec") == 0
    capsys.readouterr()
    assert run_program(["episodes", "a.fbrec", "a", "--json"]) == 0
    recorded = capsys.readouterr().out
    assert [each["name"] for each in json.loads(recorded)["labels"]] == ["odd", "good"] and "hf_abc" not in recorded
    assert program("label", "books", "a", "--remove", "good") == 0
    assert program("audit", "books", "--json") == 0
    after = json.loads(capsys.readouterr().out.partition("\n")[2])
    for counted in ("entries", "last_sequence"):
        assert after.pop(counted) == before.pop(counted) + 3
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("books", "a"), "nothing to store: give --add, --remove, --comment or --replace"),
        (("books", "b", "--add", "good"), "there is no episode b in the log of run books"),
        (("books", "a", "--add", "two words"), "no label can be called 'two words'"),
        (("books", "a", "--replace", "7"), "there is no comment 7 on episode a"),
        (("books", "no.name", "--add", "good"), "no.name"),
        (("old.fbrec", "a", "--add", "good"), "old.fbrec is a recording, which nothing is added to: name the run"),
    ],
)
def test_bad_input_is_one_line(program: Any, arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("label", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and line in captured.err and captured.err.count("\n") == 1


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


@pytest.mark.parametrize(
    ("renamed", "line"),
    [
        ("monitor", "it holds monitor, which may not do this"),
        ("operator", "the NATS server does not let the user operator"),
    ],
)
def test_a_key_that_only_reads_is_refused_in_one_line(
    secured: SecuredServer, tmp_path: Path, renamed: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it lies there as what it is, or under the name of the key that may."""
    held = AuthFolder(tmp_path)
    shutil.copy(AuthFolder(secured.folder).authority, held.authority)
    key = held.key(TRUST, renamed)
    key.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(AuthFolder(secured.folder).key(TRUST, "monitor"), key)
    options = ("--nats", secured.server.url, "--nats-auth", str(tmp_path))
    assert run_program(["label", TRUST, "e0", "--add", "good", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and line in captured.err and captured.err.count("\n") == 1


def test_the_operators_key_labels(secured: SecuredServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--nats", secured.server.url, "--nats-auth", str(secured.folder))
    assert run_program(["label", TRUST, "e0", "--add", "good", *options]) == 0
    assert capsys.readouterr().out == "e0: good\n"


def test_a_recording_with_labels_replays_as_the_one_without(tmp_path: Path, replay: Any) -> None:
    header, entries = read_header(RECORDING), load_recording(RECORDING).entries
    subjects, last = Subjects(header.run), entries[-1]
    names = sorted({each.subject.rpartition(".")[2] for each in entries if each.subject.split(".")[2] == "task"})
    labels = [
        StreamEntry(
            subject=subjects.label(name),
            payload=encode(EpisodeLabeled(episode_id=name, add=("seen",), comment="good")),
            sequence=last.sequence + number,
            time_ns=last.time_ns,
        )
        for number, name in enumerate(names, 1)
    ]
    file = tmp_path / "labelled.fbrec"
    with create_recording(file, header) as writer:
        writer.add([*entries, *labels])
    assert len(names) == 17
    assert replay(str(file)).compared == {"Observation": 46, "EpisodeFinished": 17}
