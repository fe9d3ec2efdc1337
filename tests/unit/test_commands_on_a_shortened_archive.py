"""`audit`, `record` and what follows them, of an archive that has forgotten: each says so, and none calls it whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbus.log.archive_format import list_segments, parse_first_sequence
from fleetbus.log.archive_retention import remove_segments
from fleetbus_workers.cli.program import run_program
from tests.support.log_builder import read_entries
from tests.unit.test_archive_retention import archive_log, build_run


@pytest.fixture
def begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(tmp_path)
    archive_log(tmp_path / "archive", read_entries(build_run()))
    first = parse_first_sequence(list_segments(tmp_path / "archive")[4])
    remove_segments(tmp_path / "archive", first)
    return first


def test_an_audit_of_it_says_what_is_gone_and_exits_with_neither_yes_nor_no(
    begins: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(["audit", "run", "--archive", "archive"]) == 3
    said = capsys.readouterr().out
    assert "the audit balances" not in said
    assert f"nothing that was read is wrong; entries 1 to {begins - 1} were removed, so this proves only what follows" in said
    assert run_program(["audit", "run", "--archive", "archive", "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert (facts["balanced"], facts["whole"], facts["begins"], facts["findings"]) == (False, False, begins, [])


def test_what_is_wrong_with_the_rest_is_no_all_the_same(begins: int, capsys: pytest.CaptureFixture[str]) -> None:
    list_segments(Path("archive"))[1].unlink()
    assert run_program(["audit", "run", "--archive", "archive"]) == 1
    assert "NOT BALANCED entries_missing" in capsys.readouterr().out


def test_a_recording_of_it_says_where_it_begins_and_is_audited_so(begins: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["record", "run", "--archive", "archive", "-o", "run.fbrec"]) == 1
    assert f"entries 1 to {begins - 1} were removed by the archive's retention" in capsys.readouterr().err
    assert run_program(["audit", "run.fbrec"]) == 3
    assert run_program(["replay", "run.fbrec", "--role", "learner", "--until", "batches"]) == 2
    assert "does not contain the beginning of the training" in capsys.readouterr().err


@pytest.mark.integration
def test_the_store_and_the_folder_are_given_one_after_the_other(begins: int, capsys: pytest.CaptureFixture[str]) -> None:
    archive_log(Path("copy"), read_entries(build_run()))
    assert run_program(["audit", "run", "--archive", "archive", "--archive", Path("copy").absolute().as_uri()]) == 0
    assert "the audit balances" in capsys.readouterr().out
    assert run_program(["audit", "run", "--archive", "nowhere"]) == 2
    assert "nowhere is no folder: give the one that" in capsys.readouterr().err
