"""The last line of a role whose connection is closed for good, and of one that has a fault besides."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fleetbus.errors import BusClosed, RequestUnanswered, UserError
from fleetbus_workers.cli.roles import role as roles
from fleetbus_workers.command.exit_status import CRASHED, INTERRUPTED, REFUSED

CLOSED, UNANSWERED = BusClosed("the connection is closed"), RequestUnanswered("no answer")


def run_until(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr(roles, "resolve_server_url", lambda _: "nats://127.0.0.1:1")
    monkeypatch.setattr(roles, "import_work", lambda _: None)
    monkeypatch.setattr(roles, "tune_collector", lambda: None)
    monkeypatch.setattr(roles, "run_async", fail)
    assert roles.run_role("environment", lambda: None, {}) == CRASHED  # type: ignore[arg-type, return-value]
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("error", [CLOSED, ExceptionGroup("tasks", [UNANSWERED, ExceptionGroup("inner", [CLOSED])])])
def test_a_role_whose_connection_is_closed_for_good_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    said = run_until(error, monkeypatch, capsys)
    assert said.count("closed for good") == 1 and "Traceback" not in said


def test_a_json_log_says_that_a_role_was_interrupted_while_it_was_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    try:
        *_, last = run_as_json(monkeypatch, capsys, INTERRUPTED, import_work=interrupt)
    except KeyboardInterrupt:
        pytest.fail("no record: pytest itself would end by this")
    assert (last["event"], last["reason"]) == ("stopped: interrupted", "SIGINT")


def test_a_fault_is_shown_although_the_connection_closed_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_until(ExceptionGroup("tasks", [CLOSED, KeyError("a fault of the program")]), monkeypatch, capsys)
    assert "crashed" in said and "a fault of the program" in said


@pytest.mark.parametrize(
    ("error", "status", "event", "reason"),
    [
        (UserError("no such model: name another"), REFUSED, "refused", "no such model: name another"),
        (ExceptionGroup("tasks", [KeyError("a fault")]), CRASHED, "crashed", "KeyError: 'a fault'"),
        (CLOSED, CRASHED, "stopped: the connection is closed for good", "the connection is closed"),
    ],
)
def test_a_json_log_holds_the_reason_as_one_record_and_nothing_else_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int, event: str, reason: str
) -> None:
    def fail(*_: Any) -> int:
        raise error

    lines = run_as_json(monkeypatch, capsys, status, run_async=fail)
    assert (lines[-1]["event"], lines[-1]["reason"], lines[-1]["role"]) == (event, reason, "environment")
    assert ("exception" in lines[-1]) == (event == "crashed")


def test_so_it_does_of_what_happens_before_the_role_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError("while a module was imported")

    def refuse(_: Any) -> str:
        raise UserError("no server")

    *_, crashed = run_as_json(monkeypatch, capsys, CRASHED, import_work=fail)
    assert crashed["reason"] == "ZeroDivisionError: while a module was imported"
    (refused,) = run_as_json(monkeypatch, capsys, REFUSED, resolve_server_url=refuse)
    assert refused["reason"] == "no server"


EARLY_END = """
import time
from fleetbus_workers.cli.roles import role

def load_work():
    print("importing", flush=True)
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass  # as an optional package is imported in many others

role.resolve_server_url = lambda _: "nats://127.0.0.1:1"
raise SystemExit(role.run_role("environment", load_work, {"log__format": "json"}))
"""


def test_a_role_that_is_told_to_end_while_it_is_imported_says_so_and_ends_as_one_that_drained() -> None:
    command = [sys.executable, "-c", EARLY_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    last = json.loads(said.splitlines()[-1])
    assert (process.returncode, last["event"], last["reason"]) == (0, "stopped before its work began", "SIGTERM")


def test_what_a_signal_does_is_as_before_once_a_role_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_until(CLOSED, monkeypatch, capsys)
    assert signal.getsignal(signal.SIGTERM) is before


def run_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, **parts: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """The records of a role that ends with that status; ``parts`` stand in for those of its process."""
    for owner, name in ((threading, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    parts = {"resolve_server_url": lambda _: "nats://127.0.0.1:1", "import_work": lambda _: None} | parts
    for name, part in parts.items():
        monkeypatch.setattr(roles, name, part)
    monkeypatch.setattr(roles, "tune_collector", lambda: None)
    try:
        assert roles.run_role("environment", lambda: None, {"log__format": "json"}) == status  # type: ignore[arg-type, return-value]
    finally:
        logging.captureWarnings(False)
    said = capsys.readouterr()
    assert not said.out
    return [json.loads(line) for line in said.err.splitlines()]
