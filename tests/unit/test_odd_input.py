"""Commands given what no command can use: refused in one line, by the command line itself, before anything is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from workers.cli.program import REFUSED, run_program

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command line that has to be refused; the one line that it prints."""

    def run(*arguments: str) -> str:
        status = run_program(arguments)
        shown = capsys.readouterr()
        assert (status, shown.out) == (REFUSED, ""), shown.err
        (line,) = shown.err.splitlines()
        return line

    return run


def test_a_key_on_the_command_line_is_refused_and_not_ignored(refused: Refused) -> None:
    assert "--api-key" in refused("gateway", "gym", "--api-key", "k", "--port", "0", "--nats", "nats://127.0.0.1:1")


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "x"])
@pytest.mark.parametrize(
    "command",
    [
        ("gateway", "gym", "--session-timeout"),
        ("gateway", "gym", "--admit-timeout"),
        ("gateway", "openenv", "--session-timeout"),
        ("gateway", "openenv", "--resume-timeout"),
        ("gateway", "openenv", "--capacity-timeout"),
        ("top", "--stall"),
        ("evaluate", "--temperature"),
        ("tasks", "split", "tasks.json", "--eval-ratio"),
        ("tasks", "split", "tasks.json", "--max-env-share"),
    ],
)
def test_seconds_and_shares_that_are_none_are_refused_by_name(command: tuple[str, ...], value: str, refused: Refused) -> None:
    assert command[-1] in refused(*command, value)


@pytest.mark.parametrize("gateway", ["gym", "openenv"])
def test_sessions_that_would_end_at_once_are_refused(gateway: str, refused: Refused) -> None:
    assert "--session-timeout" in refused("gateway", gateway, "--session-timeout", "0")
