"""``fleetbus top``, ``metrics`` and ``sessions`` as a user types them, on the log of a finished run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus_workers.cli.program import run_program
from tests.support.servers import connect

GUESSING = Path(__file__).parents[1] / "replay" / "recordings" / "guessing.fbrec"
RUN = "small"

pytestmark = [pytest.mark.timeout(180), pytest.mark.integration]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from anyio.from_thread import start_blocking_portal

    from fleetbus.bus.nats.server import run_server

    async def fill(url: str) -> None:
        async with connect(url, run=RUN, role="test") as bus:
            await bus.declare(plan_run(RUN, lanes=2, max_bytes=0))
            for entry in load_recording(GUESSING).entries:
                await bus.publish(entry.subject, entry.payload)

    store = tmp_path_factory.mktemp("looked-at")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as running:
        portal.call(fill, running.url)
        yield running


def read_stdout(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    found = run_program(arguments)
    captured = capsys.readouterr()
    assert found == code, captured
    return captured.out


def test_top_once_shows_a_finished_run(server: Any, capsys: Any) -> None:
    arguments = ("top", RUN, "--nats", server.url, "--once", "--monitor-url", server.monitor_url)
    facts = json.loads(read_stdout(capsys, *arguments, "--json"))
    assert facts["numbers"]["finished"] and facts["numbers"]["finished_episodes"] == 33 and facts["stalls"] == []
    assert facts["server"]["entries"] == len(load_recording(GUESSING).entries)
    assert facts["server"]["slow_consumers"] == 0 and facts["server"]["connections"] >= 1
    assert {each["kind"] for each in facts["server"]["consumers"]} == {"act", "obs", "task"}
    shown = read_stdout(capsys, *arguments)
    assert "run small · finished" in shown and "slow consumers 0" in shown


def test_a_reader_of_top_that_has_enough_is_no_error(server: Any) -> None:
    command = [sys.executable, "-m", "fleetbus_workers.cli", "top", RUN, "--nats", server.url, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None and top.stderr is not None
        assert json.loads(top.stdout.readline())["run"] == RUN
        top.stdout.close()
        assert top.stderr.read() == ""


def test_metrics_of_a_finished_run_go_to_a_file(server: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "metrics.jsonl"
    read_stdout(capsys, "metrics", RUN, "--nats", server.url, "--port", "-1", "--jsonl", str(file), "--until-finished")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all("reward" in line and "loss" in line for line in steps)
    assert [line["evaluation"] for line in lines if line not in steps] == ["start", "end", "end_greedy"]


def test_a_run_that_nobody_serves_has_no_sessions(server: Any, capsys: Any) -> None:
    assert json.loads(read_stdout(capsys, "sessions", RUN, "--nats", server.url, "--json")) == []


@pytest.mark.parametrize("command", ["top", "metrics", "sessions", "diagnose"])
def test_an_unknown_run_is_one_line(command: str, server: Any, capsys: Any) -> None:
    capsys.readouterr()
    assert run_program([command, "no-such-run", "--nats", server.url]) == 2
    assert "no-such-run" in capsys.readouterr().err


NAMING = ("diagnose", "evaluate", "metrics", "monitor", "sessions", "top", "cancel", "drain")


@pytest.mark.parametrize("command", NAMING)
def test_every_command_that_needs_a_run_takes_it_behind_the_same_option(command: str, capsys: Any) -> None:
    assert read_stdout(capsys, command, "--help").count("  --run ") == 1


def test_a_live_log_is_diagnosed_as_its_recording_is(server: Any, tmp_path: Path, capsys: Any) -> None:
    """Its own recording: results name Actions by their place in the log, and the fixture stores them at other places."""
    file = tmp_path / "live.fbrec"
    read_stdout(capsys, "record", RUN, "--nats", server.url, "--output", str(file))
    live = json.loads(read_stdout(capsys, "diagnose", RUN, "--nats", server.url, "--json"))
    assert live == json.loads(read_stdout(capsys, "diagnose", str(file), "--json"))
    assert live["last_step"] > 0
