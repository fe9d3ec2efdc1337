"""The last line of a role whose connection is closed for good, and of one that has a fault besides."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.errors import BusClosed, RequestUnanswered
from fleetbus_workers.cli.roles import role as roles
from fleetbus_workers.command.exit_status import CRASHED

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


def test_a_fault_is_shown_although_the_connection_closed_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_until(ExceptionGroup("tasks", [CLOSED, KeyError("a fault of the program")]), monkeypatch, capsys)
    assert "crashed" in said and "a fault of the program" in said
