"""``fleetbus diagnose`` on a recording: a table and findings for people, the same as JSON, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import encode
from fleetbus_workers.cli.program import run_program
from tests.support.diagnosed_run import DiagnosedRun, find_subject


def write(file: Path, run: DiagnosedRun) -> Path:
    told = list(enumerate(run.messages(), start=1))
    with create_recording(file, RecordingHeader(run="run")) as writer:
        writer.add([StreamEntry(subject=find_subject(m), payload=encode(m), sequence=n, time_ns=n) for n, m in told])
        writer.finish()
    return file


def lose_tokens(step: int, metrics: dict[str, float]) -> None:
    if step >= 6:
        metrics["logprob_difference_mean"] = 0.004 * (step - 5)


def test_a_recording_is_diagnosed_as_its_messages_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "run.fbrec", DiagnosedRun(1, steps=14, plant_metrics=lose_tokens))
    assert run_program(["diagnose", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = DiagnosedRun(1, steps=14, plant_metrics=lose_tokens).diagnose()
    assert [each["kind"] for each in found["findings"]] == ["old_weights"] == [each.kind for each in expected.findings]
    assert found["findings"][0] | {"time_ns": 0} == msgspec.to_builtins(expected.findings[0])
    assert found["findings"][0]["time_ns"] > 0
    assert (found["first_step"], found["last_step"], found["findings"][0]["step"]) == (1, 14, 6)


def test_the_report_says_since_when_how_much_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "run.fbrec", DiagnosedRun(1, steps=14, plant_metrics=lose_tokens))
    assert run_program(["diagnose", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "OLD WEIGHTS since step 6: the engine samples with older weights than those that it names" in shown
    assert "  began     " in shown and "0.004 at step 6, 0.036 at step 14" in shown
    assert "do        see in the log of the inference worker" in shown
    healthy = write(tmp_path / "healthy.fbrec", DiagnosedRun(1, steps=14))
    assert run_program(["diagnose", str(healthy)]) == 0
    assert "nothing is wrong that this can tell\n" in capsys.readouterr().out
    begun = write(tmp_path / "begun.fbrec", DiagnosedRun(1, steps=2))
    assert run_program(["diagnose", str(begun)]) == 0
    assert "nothing is wrong that this can tell from so few steps: most of it takes 4 or more\n" in capsys.readouterr().out


def test_a_run_without_a_step_is_not_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "none.fbrec", DiagnosedRun(1, steps=0))
    assert run_program(["diagnose", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "no step was trained yet" in shown and "nothing is wrong" not in shown
    assert f"`fleetbus episodes {file}` says what became of each episode" in shown


def test_an_unbounded_measure_and_an_unknown_interval_are_valid_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run.fbrec", DiagnosedRun(1, steps=1))
    assert run_program(["diagnose", str(file), "--json"]) == 0
    measures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["measures"]}
    assert measures["reward"]["bound"] is None
    assert measures["reward"]["size"]["low"] is None


def test_a_recording_that_is_not_there_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["diagnose", "missing.fbrec"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
