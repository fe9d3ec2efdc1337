"""The units for systemd fit the command line, the settings, the users of `fleetbus auth`, each other, and systemd itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import click
import pytest

from fleetbus.auth.permissions import get_user
from fleetbus.config.load import load_configuration
from fleetbus.config.settings import LimitSettings
from tests.support.command_lines import parse_command_line

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
ROLES = [unit for unit in UNITS if "@" in unit.name]
PROTOCOLS = ("gym", "openenv", "agents")
EXCEPTIONS = {
    "environment": {"RestrictAddressFamilies", "RestrictNamespaces", "SystemCallFilter"},
    "inference": {"PrivateDevices"},
    "learner": {"PrivateDevices"},
}
"""What a role needs that the others are denied."""


def read_unit(file: Path) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        if not line.startswith(("#", "[")) and "=" in line:
            key, _, value = line.partition("=")
            found[key].append(value)
    return dict(found)


def read_role(file: Path) -> str:
    return file.name.removeprefix("fleetbus-").partition("@")[0]


def read_variables(unit: dict[str, list[str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in unit["Environment"] for pair in line.split())


def list_instances(file: Path) -> tuple[str, ...]:
    return PROTOCOLS if read_role(file) == "gateway" else ("default",)


@pytest.mark.parametrize("file", ROLES, ids=read_role)
def test_each_unit_starts_a_command_that_exists_with_options_that_it_takes(file: Path) -> None:
    program, *arguments = read_unit(file)["ExecStart"][0].split()
    assert program == "/opt/fleetbus/bin/fleetbus"
    for instance in list_instances(file):
        parsed = parse_command_line([argument.replace("%i", instance) for argument in arguments])
        assert parsed.split()[0] == read_role(file)


def test_a_command_line_that_the_program_refuses_is_found() -> None:
    for wrong in (
        ["environments"],
        ["recorder", "--archives", "x"],
        ["gateway"],
        ["gateway", "gum"],
        ["metrics", "--port", "x"],
    ):
        with pytest.raises(click.UsageError):
            parse_command_line(wrong)


@pytest.mark.parametrize("file", ROLES, ids=read_role)
def test_variables_are_settings_and_the_key_is_that_of_the_role_alone(file: Path) -> None:
    unit = read_unit(file)
    settings = {name: value for name, value in read_variables(unit).items() if name.startswith("FLEETBUS_")}
    given = dict(line.split("=", 1) for line in (FOLDER / "fleetbus.env").read_text().splitlines() if not line.startswith("#"))
    configuration = load_configuration(variables=settings | given).configuration
    key = f"/etc/fleetbus/keys/{get_user(read_role(file))}"
    assert configuration.nats.auth == key and unit["BindReadOnlyPaths"] == [f"-{key}"]
    assert unit["TemporaryFileSystem"] == ["/etc/fleetbus/keys:ro"]
    assert [line.lstrip("-") for line in unit["EnvironmentFile"]] == [
        "/etc/fleetbus/fleetbus.env", "/etc/fleetbus/%p.env", "/etc/fleetbus/%p@%i.env",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ROLES, ids=read_role)
def test_a_worker_has_longer_to_stop_than_it_drains_and_is_started_again_when_it_fails(file: Path) -> None:
    unit = read_unit(file)
    assert unit["Restart"] == ["on-failure"] and unit["StartLimitIntervalSec"] == ["0"]
    assert (unit["KillMode"], unit["KillSignal"]) == (["mixed"], ["SIGTERM"])
    if read_role(file) not in ("monitor", "metrics"):
        assert int(unit["TimeoutStopSec"][0]) > LimitSettings().drain


def test_all_units_are_hardened_alike_but_for_what_a_role_needs() -> None:
    strictest = read_unit(FOLDER / "fleetbus-recorder@.service")
    hardening = [key for key in strictest if re.match("Protect|Private|Restrict|System|NoNew|Capab|Lock|Remove|UMask", key)]
    assert len(hardening) > 20
    for file in UNITS:
        unit, role = read_unit(file), read_role(file)
        differing = {key for key in hardening if unit.get(key) != strictest[key]}
        assert differing == EXCEPTIONS.get(role, {"RemoveIPC"} if role.startswith("nats") else set()), file.name


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_systemd_takes_each_unit(file: Path, tmp_path: Path) -> None:
    """Programs that it starts have to exist: stand-ins do here."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for name in ("fleetbus", "nats-server"):
        (tmp_path / name).touch(mode=0o755)
    copy = tmp_path / file.name
    copy.write_text(file.read_text().replace("/opt/fleetbus/bin", str(tmp_path)))
    assert verify(analyze, copy) == (0, "")
    copy.write_text(copy.read_text().replace("KillMode=mixed", "KillMode=some").replace("[Install]", "[Installed]"))
    assert "Installed" in verify(analyze, copy)[1], "what is wrong is found"


def verify(analyze: str, unit: Path) -> tuple[int, str]:
    ended = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, "\n".join(line for line in ended.stderr.splitlines() if unit.stem.rstrip("@") in line)
