"""Commands given what no command can use: refused in one line, by the command line itself, before anything is done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.cli import main
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.serving.listeners import bind
from fleetbus_workers.up.checks import check_server_answers

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


@pytest.mark.integration
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org", "\udcff"])
def test_what_can_be_no_host_is_refused(host: str, refused: Refused) -> None:
    with pytest.raises(UserError, match="not an address of this machine"):
        bind(host, 0)
    with pytest.raises(UserError, match="no NATS server at"):
        check_server_answers(f"nats://{host}:4222")
    assert "no NATS server answers at" in refused("init", "--nats", f"nats://{host}:4222")


@pytest.mark.parametrize("seed", [str(1 << 64), str(-(1 << 64))])
def test_a_seed_that_no_message_can_carry_is_refused(seed: str, refused: Refused) -> None:
    assert "--run-seed" in refused("init", "--run-seed", seed, "--nats", "nats://127.0.0.1:1")


def test_ctrl_c_while_modules_are_imported_is_an_interruption_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == run_program.__module__:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, run_program.__module__)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_closed_standard_output_is_the_null_device_and_no_number_for_a_socket() -> None:
    """uvloop aborts the process when it closes a socket with such a number."""
    lines = (
        "import os, socket, sys, fleetbus_workers.cli as cli",
        "cli._open_standard_streams()",
        "print('lost'); print('said', file=sys.stderr)",
        "sys.exit(socket.socket().fileno() < 3 or os.fstat(1).st_rdev != os.stat(os.devnull).st_rdev)",
    )
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "said\n")


@pytest.mark.parametrize("command", ["audit", "episodes", "top"])
def test_a_name_that_is_too_long_for_a_file_is_no_name_of_a_run_either(
    refused: Refused, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".fleetbus" / "runs").mkdir(parents=True)  # else the system finds no folder before it reads the name
    monkeypatch.chdir(tmp_path)
    assert "must be 1 to 128 letters" in refused(command, "x" * 300)


@pytest.mark.parametrize("host", ["über.example", "", "a b", "x" * 64 + ".org", "::zz"])
def test_what_can_be_no_host_gets_no_certificate(host: str, refused: Refused, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    assert "--host" in refused("auth", "init", str(tmp_path / "auth"), "--host", host)
    assert not (tmp_path / "auth").exists()
