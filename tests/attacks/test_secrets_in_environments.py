"""An environment is named by a command line with secrets in it, or by an address: nobody reads them in what a run leaves."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
import structlog

from fleetbus.config.check import check_configuration
from fleetbus.config.load import dump_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, LogSettings, RunSettings
from fleetbus.logs.secret_formats import redact_command
from fleetbus.logs.setup import configure_logs
from fleetbus.recording import load_recording
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.up.command import hold_run

GUESSING = Path(__file__).parents[1] / "replay/recordings/guessing.fbrec"
SECRETS = ("tok-12345", "hunter22", "pw-in-url", "q-67890", "flag-4711")
ENVIRONMENT = (
    "stdio:env SERVICE_PAT=tok-12345 DB_PASSWORD='hunter22' DB_URL=postgres://u:pw-in-url@host/db "
    "server --api-key flag-4711 --port 1"
)
ADDRESS = "remote-gym:https://gym.example/v1?access_token=q-67890&size=3"


@pytest.fixture
def restored_logs() -> object:
    before = structlog.get_config()
    yield None
    structlog.configure(**before)


@pytest.mark.parametrize("environment", [ENVIRONMENT, ADDRESS])
def test_the_header_of_a_recording_does_not_hold_them(
    environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetbus_workers.cli.replay import record

    monkeypatch.chdir(tmp_path)
    configuration = Configuration(run=RunSettings(name="r", environment=environment))
    tables = record._strip_local_settings(msgspec.json.decode(dump_configuration(configuration)))
    text = msgspec.json.encode(tables).decode()
    assert not any(secret in text for secret in SECRETS), text
    assert "[redacted]" in text


def test_log_lines_do_not_hold_them(restored_logs: object) -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), stream=stream)
    structlog.get_logger().warning("environment chosen", environment=ENVIRONMENT, spec=ENVIRONMENT)
    written = stream.getvalue()
    assert "environment chosen" in written and not any(secret in written for secret in SECRETS), written


@pytest.mark.parametrize(
    ("address", "variable"),
    [
        (ADDRESS, "GYM_API_KEY"),
        ("remote-gym:https://a.example,https://b.example/?size=3&sig=q-67890", "GYM_API_KEY"),
        ("http:https://mcp.example/mcp?api_key=q-67890", "MCP_BEARER_TOKEN"),
        ("https://mcp.example/mcp?x=1&Client-Secret=q-67890", "MCP_BEARER_TOKEN"),
        ("openenv:http://h:8000?authToken=q-67890", "OPENENV_TOKEN"),
        ("ors:https://h/v1?api_key=q-67890#sums", "ORS_API_KEY"),
        ("fleet:https://h/v1?password=q-67890", "FLEET_API_KEY"),
        ("one=scripted,two=remote-gym:https://h/?token=q-67890", "GYM_API_KEY"),
    ],
)
def test_an_address_with_a_credential_is_refused_before_anything_is_written(
    address: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["up", "--environment", address]) == 2
    said = capsys.readouterr().err
    assert f"set {variable} instead" in said and "q-67890" not in said
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("address", ["remote-gym:https://h/v1?size=3&task_key=4", "http:https://h/mcp?max_tokens=2&author=x"])
def test_an_address_with_another_query_is_not(address: str) -> None:
    check_configuration(Configuration(run=RunSettings(environment=address)))


def test_a_command_keeps_what_is_no_secret() -> None:
    assert redact_command("stdio:python server.py --port 80 --name x") == "stdio:python server.py --port 80 --name x"
    assert redact_command("mcp:my_package.tools:make_server") == "mcp:my_package.tools:make_server"


def test_the_folder_of_a_new_run_is_its_users_alone(tmp_path: Path) -> None:
    configuration = Configuration(run=RunSettings(name="r", folder=str(tmp_path / "runs")))
    folder = run_folder(configuration.run)
    with hold_run(configuration, folder):
        assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.path.chmod(0o750)
    with hold_run(configuration, folder):
        assert folder.path.stat().st_mode & 0o777 == 0o750, "a group that its user let in stays"


def test_a_recording_of_a_recording_keeps_a_clean_header(tmp_path: Path) -> None:
    copied = tmp_path / "copy.fbrec"
    assert run_program(["record", str(GUESSING), "-o", str(copied)]) == 0
    assert load_recording(copied).header.redacted
