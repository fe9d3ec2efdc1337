"""Weights of a run of several trained policies in a recording: files of the same names, each that of its policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.config.run_folder import RunFolder, policy_folder_below
from fleetbus.config.seats import configure_seat
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus.recording import Recording, load_recording
from fleetbus.recording.export import Export, PublishedWeights, restore_files
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import LineageStarted, Message, PolicyPublished, Subjects, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.cli.replay.record import _add_weights
from fleetbus_workers.replay.recorded_choices import find_run_weights, find_trained_seat

SUBJECTS = Subjects("r")
NAME = "l1-v000001.safetensors"
JOINS = LineageStarted(lineage="l1", worker="w", settings={"learner": {"requested_by": "default"}})


def build_entries(messages: list[tuple[str, Message]]) -> list[StreamEntry]:
    return [
        StreamEntry(subject=SUBJECTS.policy(policy), payload=encode(message), sequence=number, time_ns=number)
        for number, (policy, message) in enumerate(messages, 1)
    ]


def publish(policy: str, uri: str) -> tuple[str, Message]:
    version = PolicyPublished(policy=policy, version=1, lineage="l1", step=1, uri=uri, manifest=(), size_bytes=1)
    return policy, version


@pytest.mark.parametrize("place", ["where they were published", "in the run's folder of this machine"])
def test_the_weights_of_each_policy_are_in_a_recording_and_in_a_copy_of_it(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = RunFolder(tmp_path / "r"), tmp_path / "a.fbrec"
    kept = {"": folder.weights / NAME, "solver": policy_folder_below(folder, "solver").weights / NAME}
    for policy, weights in kept.items():
        weights.parent.mkdir(parents=True)
        weights.write_bytes(b"weights of " + (policy or "default").encode())
    uris = {policy: path.as_uri() for policy, path in kept.items()}
    if "machine" in place:
        uris = {policy: Path("/elsewhere", policy, NAME).as_uri() for policy in kept}
    entries = build_entries([publish("default", uris[""]), ("solver", JOINS), publish("solver", uris["solver"])])
    with create_recording(file, RecordingHeader(run="r")) as writer:
        export = Export(writer, redactor=None)
        export.write(entries)
        assert export.published == [PublishedWeights("", uris[""]), PublishedWeights("solver", uris["solver"])]
        assert _add_weights(writer, export.published, folder, None) == 2

    assert run_program(["record", str(file), "-o", str(tmp_path / "b.fbrec"), "--weights", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["weights_files"] == 2
    for recording in (load_recording(file), load_recording(tmp_path / "b.fbrec")):
        assert recording.files == {NAME: b"weights of default", f"policies/solver/{NAME}": b"weights of solver"}
        for policy in ("default", "solver"):
            restored = restore_files(recording.files, tmp_path / policy, "" if policy == "default" else policy)
            assert {name: path.read_bytes() for name, path in restored.items()} == {NAME: f"weights of {policy}".encode()}


def test_a_replay_takes_the_seat_the_model_and_the_files_of_the_policy_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunSettings(seats="solver=train:small\njudge=model:large\nsecond=solver")
    seat = find_trained_seat(run, "solver")
    assert seat is not None and configure_seat(Configuration(run=run), seat).run.model == "small"
    assert find_trained_seat(run, "") is find_trained_seat(run, "default") is None
    for policy in ("judge", "nobody"):
        with pytest.raises(UserError, match=f"--policy {policy} is trained by no learner .*: name one of default, solver"):
            find_trained_seat(run, policy)
    files = {"": Path(".fleetbus/runs/r/weights"), "solver": Path(".fleetbus/runs/r/policies/solver/weights")}
    for folder in files.values():
        folder.mkdir(parents=True)
        (folder / NAME).write_bytes(b"x")
    recording = Recording(path=tmp_path, header=RecordingHeader(run="r"), entries=[])
    assert {policy: find_run_weights(recording, policy)[NAME].parent for policy in files} == files


def test_a_policy_is_chosen_of_inference_workers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with create_recording(tmp_path / "a.fbrec", RecordingHeader(run="r")):
        pass
    assert run_program(["replay", str(tmp_path / "a.fbrec"), "--role", "learner", "--policy", "solver"]) == 2
    assert "give --role inference" in capsys.readouterr().err


def test_no_name_of_a_policy_leads_out_of_the_runs_folder(tmp_path: Path) -> None:
    entries = build_entries([("solver", JOINS), publish("solver", "file:///x/" + NAME)])
    odd = [StreamEntry(subject="fb.r.policy.../../up", payload=e.payload, sequence=e.sequence, time_ns=1) for e in entries]
    with create_recording(tmp_path / "a.fbrec", RecordingHeader(run="r")) as writer:
        export = Export(writer, redactor=None)
        export.write([odd[0]])
        assert list(export._find_weights(odd[1])) == []
