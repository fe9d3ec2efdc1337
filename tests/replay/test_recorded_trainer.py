"""A learner replayed up to its batches: no model is needed, and what is wrong with a batch is found and named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from fleetbus.recording import load_recording
from fleetbus_schemas import Exclusion, StepTrained, decode, encode
from fleetbus_workers.images.reader import ImageMismatch
from fleetbus_workers.learner import batches
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.batch_metrics import compute_advantage_metrics
from fleetbus_workers.replay import Report
from fleetbus_workers.replay.fixtures import replay_blocking
from fleetbus_workers.replay.recorded_trainer import RecordedTrainer

GUESSING = Path(__file__).parent / "recordings" / "guessing.fbrec"

pytestmark = pytest.mark.timeout(300)


def replayed(source: Any = GUESSING) -> Report:
    return replay_blocking(source, role="learner", until="batches")


def test_requests_batches_and_lineage_are_compared_and_the_report_says_what_was_not() -> None:
    report = replayed()
    report.check()
    assert report.compared["StepTrained"] == 3 and report.compared["PolicyPublished"] == 4
    assert report.compared["EpisodeRequested"] > 0 and report.compared["LineageStarted"] == 2
    assert "not checked: loss, gradients, weights" in report.checked
    assert report.notes["training sequences that are the recorded ones, token by token"] == 24
    assert report.checked in "\n".join(report.lines())


def test_neither_torch_nor_a_model_is_needed(tmp_path: Path) -> None:
    import subprocess

    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from fleetbus_workers.replay.fixtures import replay_blocking
report = replay_blocking({str(GUESSING)!r} and __import__("pathlib").Path({str(GUESSING)!r}), role="learner", until="batches",
                    model="/no/such/folder")
report.check()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def changed(**values: Any) -> Any:
    """Sequences of the learner under test with other values in some field."""
    original = batches.build_sequence

    def sequence(*arguments: Any) -> Any:
        made = original(*arguments)
        return msgspec.structs.replace(made, **{name: change(getattr(made, name)) for name, change in values.items()})

    return sequence


@pytest.mark.parametrize(
    ("field", "change", "named"),
    [
        ("ids", lambda ids: np.concatenate((ids[:5], ids[5:6] + 1, ids[6:])), "ids[5]"),
        ("ids", lambda ids: ids[:-1], "ids (length)"),
        ("loss_mask", lambda mask: ~mask, "loss_mask[0]"),
        ("logprobs", lambda logprobs: logprobs * 2, "logprobs["),
        ("versions", lambda versions: versions + 1, "versions["),
    ],
)
def test_a_batch_that_holds_something_else_is_found_and_named(
    field: str, change: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "build_sequence", changed(**{field: change}))
    first = replayed().first
    assert first is not None
    assert first.message.startswith("batch of step 1 episode g0") and first.field.startswith(named)


def test_advantages_that_change_places_are_found_by_their_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording was made before the moment was measured, so it is put into the recorded steps first."""
    seen: list[dict[str, float]] = []

    def measured(sequences: Any) -> dict[str, float]:
        seen.append(compute_advantage_metrics(sequences))
        return seen[-1]

    monkeypatch.setattr("fleetbus_workers.learner.batch_training.compute_advantage_metrics", measured)
    replayed().check()
    recording = load_recording(GUESSING)
    recording.entries = [with_moment(entry, seen) for entry in recording.entries]
    replayed(recording).check()
    original = batches.compute_episode_advantages

    def exchanged(*arguments: Any) -> Any:
        return [*reversed(original(*arguments))]

    monkeypatch.setattr(batches, "compute_episode_advantages", exchanged)
    first = replayed(recording).first
    assert first is not None and first.message.startswith("StepTrained step")
    assert first.field.startswith("metrics.advantage_")


def with_moment(entry: Any, seen: list[dict[str, float]]) -> Any:
    if entry.subject.split(".")[2] != "train" or b"StepTrained" not in entry.payload:
        return entry
    step = decode(StepTrained, entry.payload)
    metrics = step.metrics | {"advantage_moment": seen[step.step - 1]["advantage_moment"]}
    return msgspec.structs.replace(entry, payload=encode(msgspec.structs.replace(step, metrics=metrics)))


def test_the_moment_tells_places_apart_that_extremes_and_sizes_do_not() -> None:
    class Sequence(msgspec.Struct):
        advantages: Any
        loss_mask: Any

    def moment(*values: float) -> dict[str, float]:
        return compute_advantage_metrics([Sequence(np.array(values, np.float32), np.ones(len(values), bool))])  # type: ignore[list-item]

    one, other = moment(1.0, -1.0, 0.5), moment(-1.0, 1.0, 0.5)
    assert one.pop("advantage_moment") != other.pop("advantage_moment")
    assert one == other


@pytest.mark.integration
def test_a_step_that_takes_longer_than_the_patience_is_no_hanging_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from fleetbus_workers.replay.recorded_trainer import RecordedTrainer

    train = RecordedTrainer.train

    def slow(trainer: RecordedTrainer, *arguments: Any, **options: Any) -> Any:
        time.sleep(0 if trainer.sequences else 5)
        return train(trainer, *arguments, **options)

    monkeypatch.setattr(RecordedTrainer, "train", slow)
    replay_blocking(GUESSING, role="learner", until="batches", patience_seconds=4.0).check()


def test_requests_that_take_longer_than_training_are_still_made_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Admission._request_group

    async def request_slowly(admission: Admission, *arguments: Any) -> None:
        await anyio.sleep(0.1)
        await request(admission, *arguments)

    monkeypatch.setattr(Admission, "_request_group", request_slowly)
    replayed().check()


def test_an_episode_that_was_excluded_for_its_images_is_excluded_again() -> None:
    step = StepTrained(
        lineage="l1",
        step=1,
        version=1,
        episodes=("b",),
        excluded=(Exclusion(episode_id="a", reason="image_mismatch"), Exclusion(episode_id="c", reason="timeout")),
    )
    trainer = RecordedTrainer(0, {1: step}, {}, episodes={}, on_difference=lambda *_: None, truncation_mask="")
    ids = np.zeros(3, np.int32)
    with pytest.raises(ImageMismatch, match="episode a was excluded, image_mismatch"):
        trainer.check_images("a", ids, ())
    for episode in "bc":
        trainer.check_images(episode, ids, ())
