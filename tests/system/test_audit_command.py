"""The commands audit, cancel and drain against a real server: what they print and how they exit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus.recording.format import RecordingEnd, encode_part
from fleetbus_schemas import EpisodeRequested, Exclusion, LineageStarted, Message, StepTrained, Subjects, Task, encode
from fleetbus_workers.cli.program import run_program
from tests.support.servers import connect, needs_only_copy, run_server

S = Subjects("books")


def requested(episode: str) -> tuple[str, Message]:
    request = EpisodeRequested(
        episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default", deadline_ns=1
    )
    return S.task("default", episode), request


def excluded(step: int, episode: str) -> tuple[str, Message]:
    reasons = (Exclusion(episode_id=episode, reason="stale"),)
    return S.train("default"), StepTrained(lineage="l1", step=step, version=step, episodes=(), excluded=reasons)


LINEAGE = (S.train("default"), LineageStarted(lineage="l1", worker="w"))


class Served:
    """A server with one run, beside the synchronous test."""

    def __init__(self, server: NatsServerProcess, portal: BlockingPortal) -> None:
        self.url = server.url
        self._portal = portal

    def put(self, *messages: tuple[str, Message]) -> None:
        self._portal.call(self._put, messages)

    def trim(self) -> None:
        self._portal.call(self._trim)

    async def _put(self, messages: tuple[tuple[str, Message], ...]) -> None:
        async with connect(self.url, run="books") as bus:
            await bus.declare(plan_run("books", lanes=1))
            for subject, message in messages:
                await bus.publish(subject, encode(message))

    async def _trim(self) -> None:
        async with connect(self.url, run="books") as bus:
            await bus.purge(S.tasks(), below=1 << 40)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    store = tmp_path / "runs" / "books" / "nats"
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as server:
        yield Served(server, portal)


@pytest.fixture
def program(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return partial(call, url=served.url)


def call(*arguments: str, url: str) -> int:
    return run_program([*arguments, "--nats", url])


def test_a_deep_audit_says_which_steps_the_log_does_not_prove(
    served: Served, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    step = StepTrained(lineage="l1", step=1, version=1, episodes=("a",))
    served.put(LINEAGE, requested("a"), (S.train("default"), step))
    assert program("audit", "books", "--deep") == 1
    printed = capsys.readouterr().out
    assert "0 trained episodes proven to be what was sampled" in printed
    assert "NOT BALANCED digest_missing: 1 steps without digests" in printed
    assert program("audit", "books", "--json") == 1
    assert json.loads(capsys.readouterr().out)["proven"] is None


def test_books_that_balance_exit_with_0_and_say_so(served: Served, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.put(LINEAGE, requested("a"), requested("b"), excluded(1, "a"))
    assert program("audit", "books") == 0
    output = capsys.readouterr().out
    assert "the audit balances" in output
    assert "excluded: stale" in output


def test_books_that_do_not_balance_exit_with_1_and_name_the_ids(
    served: Served, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served.put(LINEAGE, requested("a"), excluded(1, "a"), excluded(2, "a"))
    assert program("audit", "books") == 1
    assert "NOT BALANCED excluded_twice: 1 episodes excluded more than once: a" in capsys.readouterr().out
    assert program("audit", "books", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["balanced"] is False
    assert {finding["kind"]: finding["ids"] for finding in facts["findings"]}["excluded_twice"] == ["a"]
    assert facts["books"]["requested"] == 1


def test_bad_input_exits_with_2_and_one_line(served: Served, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("audit", "elsewhere") == 2
    assert "run elsewhere" in capsys.readouterr().err
    served.put(requested("a"), requested("b"), LINEAGE)
    served.trim()
    assert program("audit", "books") == 2
    assert "2 entries of the log of run books were trimmed: give --archive" in capsys.readouterr().err


@pytest.mark.integration
@needs_only_copy
def test_a_run_that_nobody_serves_is_audited_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "runs" / "books" / "nats"
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as server:
        Served(server, portal).put(LINEAGE, requested("a"))
    assert run_program(["audit", "books", "--run-folder", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["books"]["waiting"] == 1


def test_cancel_says_what_became_of_each_episode(served: Served, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.put(LINEAGE, requested("a"), requested("b"))
    assert program("cancel", "a", "--run", "books") == 0
    assert "a: cancelled by cancel-" in capsys.readouterr().out
    assert program("cancel", "a", "b", "--run", "books", "--json") == 0
    states = {each["episode_id"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states == {"a": "over", "b": "cancelled"}
    assert program("cancel", "nobody", "--run", "books") == 2
    assert "nobody: was never requested" in capsys.readouterr().out
    assert program("cancel", "*", "--run", "books") == 2
    assert "episode '*' must be" in capsys.readouterr().err


def test_drain_knows_who_is_there(served: Served, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served.put(LINEAGE)
    assert program("drain", "nobody", "--run", "books") == 2
    assert "no worker of that name is there" in capsys.readouterr().out


# Recordings


@pytest.fixture
def recorded(served: Served, program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Stores messages, records the run, and gives the name of the file."""

    def record(*messages: tuple[str, Message], options: tuple[str, ...] = ()) -> str:
        served.put(*messages)
        assert program("record", "books", "-o", "books.fbrec", "--force", *options) == 0
        capsys.readouterr()
        return "books.fbrec"

    return record


def test_a_recording_of_a_whole_run_is_audited_as_the_run_is(
    recorded: Any, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(LINEAGE, requested("a"), requested("b"), excluded(1, "a"))
    assert program("audit", "books", "--json") == 0
    of_the_run = capsys.readouterr().out
    assert run_program(["audit", file, "--json"]) == 0
    assert capsys.readouterr().out == of_the_run
    assert run_program(["audit", recorded(excluded(2, "a"))]) == 1
    said = capsys.readouterr().out
    assert said.startswith("run books, ") and "NOT BALANCED" in said


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["", "deep"])
@pytest.mark.parametrize("how", ["is damaged at byte", "has no end"])
def test_a_recording_whose_end_is_torn_off_is_audited_up_to_there_and_does_not_balance(
    recorded: Any, capsys: pytest.CaptureFixture[str], how: str, deep: tuple[str, ...]
) -> None:
    file = Path(recorded(LINEAGE, requested("a")))
    cut = len(encode_part(RecordingEnd(2, 2))) if how == "has no end" else 3
    file.write_bytes(file.read_bytes()[:-cut])
    assert run_program(["audit", str(file), "--json", *deep]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["balanced"], facts["books"]["requested"]) == (False, 1)
    assert [each["kind"] for each in facts["findings"]] == ["torn"] and how in facts["findings"][0]["ids"][0]


def test_a_recording_of_part_of_a_run_is_refused_in_one_line(
    served: Served, recorded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert run_program(["audit", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    file = recorded(LINEAGE, requested("a"), requested("b"), options=("--episode", "a"))
    assert "contains only 1 episode of run books" in refusal(file)
    assert "--archive belongs to a run" in refusal(file, "--archive", str(tmp_path))
    served.trim()
    assert "lacks 2 entries that were trimmed" in refusal(recorded(excluded(1, "a")))
    assert "no-such.fbrec cannot be read" in refusal("no-such.fbrec")
