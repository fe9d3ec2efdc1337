"""What earlier releases wrote is read for ever: each file in ``recordings/releases`` is a whole small run, named by its date.

They were written by ``up --steps 2 --learner-groups 2 --learner-group-size 2`` and ``record``, of commits 49679514, e1cca60b.
A file is added when a release changes what is stored, and none is ever written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbus.log.stored_entries import decode_stored
from fleetbus.recording import load_recording
from fleetbus_schemas import StepTrained
from fleetbus_schemas.protocol import PROTOCOL
from fleetbus_workers.cli.program import run_program

FILES = sorted((Path(__file__).parent / "recordings" / "releases").glob("*.fbrec"))
STEPS, EPISODES = 2, 8

pytestmark = pytest.mark.timeout(300)
by_file = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


Shown = pytest.CaptureFixture[str]


def read(shown: Shown, *arguments: str) -> str:
    assert run_program(arguments) == 0, shown.readouterr()
    return shown.readouterr().out


def test_there_are_recordings_of_earlier_releases() -> None:
    assert FILES
    assert PROTOCOL == 2, "the protocol was raised: add a recording of the release before"


@by_file
def test_every_message_of_an_earlier_release_is_read(file: Path) -> None:
    messages = [decode_stored(entry) for entry in load_recording(file).entries]
    assert sum(isinstance(message, StepTrained) for message in messages) == STEPS


@by_file
def test_the_audit_of_an_earlier_release_balances(file: Path, capsys: Shown) -> None:
    assert "the audit balances" in read(capsys, "audit", str(file))


@by_file
def test_episodes_and_diagnosis_of_an_earlier_release_are_shown(file: Path, capsys: Shown) -> None:
    assert len(read(capsys, "episodes", str(file)).splitlines()) >= EPISODES
    assert f"steps 1 to {STEPS}" in read(capsys, "diagnose", str(file))


@by_file
def test_the_environment_replays_what_an_earlier_release_recorded(file: Path, replay: Any) -> None:
    report = replay(str(file))
    assert report.compared["EpisodeFinished"] >= EPISODES
