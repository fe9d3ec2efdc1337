"""The screen of `top`: within 80 columns and the terminal's height, and what one looks for is never what does not fit."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fleetbus.core.episode.failure_kinds import FailureKind
from fleetbus_schemas import EngineLoad, Heartbeat, WorkerRole
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.formatting import format_bytes
from fleetbus_workers.observe.run.jetstream import ConsumerPending, ServerView
from fleetbus_workers.observe.run.nats_http import Client, SlowClientDisconnect
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Termination
from fleetbus_workers.observe.run.watchdog import Stall
from fleetbus_workers.observe.top.view import SLOW_BYTES, build_facts, screen

NOW = 1_000.0
SERVER = ServerView(
    entries=5,
    oldest="2026-11-21T12:00:00Z",
    consumers=(ConsumerPending(kind="obs", consumers=500, pending=1_234_567, unacked=3, redelivered=4_321),),
    connections=612,
    slow_consumers=2,
    memory_bytes=123_456_789,
    version="2.15.1",
    uptime="12d3h22m11s",
    clients=(Client(worker="environment-17-a-long-name", pending_bytes=12_345_678), Client(worker="quick", pending_bytes=9)),
    cut=(SlowClientDisconnect(worker="inference-9-a-long-name", reason="Slow Consumer", at="2026-11-21T12:34:56Z"),),
)
STALL = Stall(where="learner", reason="nothing is admitted", seconds=70.0, advice="see its log")


def render(state: RunState, server: ServerView = SERVER, *, width: int = 80, height: int = 24, run: str = "r") -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO())
    health = LogHealth()
    health.record_usage(2_900_000_000, 1 << 32, 12_345, NOW)
    shown = build_facts(RunView(state, health, server, [STALL], now=NOW, now_ns=int(NOW * 1e9)), run=run)
    console.print(screen(shown, console))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def fleet(workers: int, *, silent: int = -1) -> RunState:
    state = RunState(steps=100)
    roles: tuple[WorkerRole, ...] = ("environment", "inference")
    for number in range(workers):
        beat = Heartbeat(role=roles[number % 2], worker=f"w{number:03}", slots=64, in_flight=7, policy_version=150)
        state.worker_registry.record_heartbeat(beat, NOW - (9.0 if number == silent else 0.5))
    state.worker_registry.record_heartbeat(Heartbeat(role="learner", worker="lea", slots=8, in_flight=8), NOW)
    return state


def test_a_silent_worker_is_shown_however_many_work_and_however_low_the_terminal_is() -> None:
    lines = render(fleet(60, silent=41))
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    (line,) = [line for line in lines if line.startswith("w041")]
    assert "silent" in line and "9 s ago" in line
    assert any(line.startswith("lea") for line in lines), "the one learner is worth a row"
    shown = sum(line.startswith(("w0", "lea")) for line in lines)
    hidden = [int(part.split()[0]) for part in lines[-1].removeprefix("and ").split(" · ")]
    assert shown + sum(hidden) == 61


@pytest.mark.parametrize("workers", [0, 3, 60])
@pytest.mark.parametrize("server", [SERVER, ServerView(), ServerView(hint="no server monitoring: how to turn it on")])
def test_nothing_is_wider_than_80_columns_or_broken_within_a_number(workers: int, server: ServerView) -> None:
    lines = render(fleet(workers), server, run="the-run-of-somebody-who-likes-long-names-and-has-many")
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "0.0 episodes/s" in text and "0 tokens/s" in text, "the name of the run leaves room for what it does"
    assert "stuck at the learner for 70 s" in text


def test_what_engines_say_of_themselves_is_a_line_of_what_is_known() -> None:
    state = fleet(2)
    loads = (
        EngineLoad(running=1200, waiting=3, kv_cache_use=0.41, preemptions=2, tokens_per_second=900.0, prefix_hits=0.82),
        EngineLoad(running=1, waiting=0, tokens_per_second=100.0),
    )
    for number, load in enumerate(loads):
        state.worker_registry.record_heartbeat(Heartbeat(role="inference", worker=f"inf{number}", engine=load), NOW)
    text = " ".join(" ".join(render(state)).split())
    parts = ("engines: 1,201 requests", "3 queued", "1.0k tokens/s", "cache 41% full", "prefix hits 82%", "preempted 2")
    assert all(part in text for part in parts)
    assert "engines:" not in " ".join(render(fleet(2)))


def test_the_server_is_a_line_and_who_does_not_read_another() -> None:
    text = "\n".join(render(fleet(2)))
    assert "nats 2.15.1 up 12d3h22m11s · 612 connections · 123.5 MB of memory" in text
    assert "environment-17-a-long-name has 12.3 MB unread" in text and "quick" not in text
    assert "inference-9-a-long-name was disconnected at 12:34:56" in text
    assert SLOW_BYTES > 9


def test_episodes_that_ended_otherwise_are_told_apart_from_those_that_were_not_trained() -> None:
    state = fleet(2)
    state.errors.update({"turns": 7, "ServerGone": 2})
    state.training.excluded.update({"stale": 8})
    lines = render(state)
    assert "cut short or failed: turns 7 · ServerGone 2 · not trained: stale 8" in lines
    assert any(line.startswith("lea") and "8 groups" in line for line in lines)


def test_what_an_error_says_of_itself_is_no_line_of_its_own() -> None:
    state = fleet(2)
    said = "x\nover: its training finished\ny"
    state.errors.update({said: 2})
    state.training.excluded.update({said: 2})
    kind = FailureKind(outcome="env_failed", error_class=said, location=said, error="", episode_id="e", count=2)
    assert not any(line.strip() == "over: its training finished" for line in render(state))
    assert len(kind.line.splitlines()) == 1


def test_without_workers_a_line_says_so() -> None:
    assert render(RunState(1))[-1] == "no heartbeat received yet"


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1_500, "1.5 kB"), (2e6, "2.0 MB"), (3.21e9, "3.2 GB")])
def test_bytes_have_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_a_run_that_is_over_is_no_trouble_though_its_server_is_gone() -> None:
    health = LogHealth()
    health.record_usage(6_500_000, 1 << 32, 12_345, NOW)
    health.record_failure("the NATS server does not answer", NOW)
    ending = Termination(
        how="stopped", since_ns=1, seconds=60.0, line="over: it was stopped normally; `fleetbus up` resumes it"
    )
    shown = build_facts(
        RunView(RunState(steps=9), health, SERVER, [], now=NOW, now_ns=int(NOW * 1e9), termination=ending), run="r"
    )
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    console.print(screen(shown, console))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert "over, step 0" in text and "it was stopped normally; `fleetbus up` resumes it" in text
    assert "log 6.5 MB · no longer served" in text and "does not answer" not in text
    assert "\x1b[1;31m" not in text, "nothing is red"
    assert "unread" not in text, "what was known of the server is old"


def test_square_brackets_in_a_name_are_shown_and_not_obeyed() -> None:
    """Rich takes them for markup, and a closing one without an opening one for an error."""
    state = fleet(0)
    state.worker_registry.record_heartbeat(Heartbeat(role="inference", worker="[/red]:smile:[bold]"), NOW)
    shown = build_facts(RunView(state, LogHealth(), SERVER, [STALL], now=NOW, now_ns=int(NOW * 1e9)), run="r")
    output = io.StringIO()
    open_console(output, width=80).print(screen(shown))
    assert "[/red]:smile:[bold]" in output.getvalue()
