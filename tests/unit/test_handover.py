"""Batches that are handed to a trainer of others: what is a row, when a batch is trained, saved, and given up."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetbus.errors import UserError
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE
from fleetbus_workers.trainers import handover as module
from fleetbus_workers.trainers.handover import Handover, StepEnd, TrainerEnded
from fleetbus_workers.trainers.rows import Row, build_filler, build_rows
from fleetbus_workers.trainers.trainer import (
    HandoverTrainer,
    TrainerState,
    format_history,
    hash_files,
    read_history,
    read_state,
)
from fleetbus_workers.trainers.weights import SentWeights

ROWS = 4
"""Of a step; two are taken at once."""


def build_sequence(advantages: list[float], episode: str = "e0") -> TrainingSequence:
    """A prompt of two tokens, and one of the policy's per advantage."""
    tokens = len(advantages) + 2
    return TrainingSequence(
        episode_id=episode,
        group_id="g0",
        ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.array([False] * 2 + [True] * len(advantages)),
        logprobs=np.full(tokens, -0.5, np.float32),
        advantages=np.array([0.0, 0.0, *advantages], np.float32),
        versions=np.zeros(tokens, np.int32),
    )


FILLER = build_filler([*build_rows([build_sequence([1.0])])])


def build_batch(rows: int) -> list[Row]:
    return [row for index in range(rows) for row in build_rows([build_sequence([1.0], f"e{index}")])]


def take_all(handover: Handover) -> list[Row]:
    rows = []
    while len(handover):
        rows.append(handover.take(0))
    return rows


@pytest.fixture
def handover() -> Handover:
    return Handover(rows_per_step=ROWS, rows_ahead=2)


def test_a_step_is_one_of_fillers_unless_a_row_of_it_is_none(handover: Handover) -> None:
    for rows in (0, 1, 5, 0):  # so many of 1, 1, 2 and 1 steps
        handover.give(build_batch(rows), FILLER, is_last=False)
    found = []
    for _ in range(5):
        found.append(handover.is_filler_step())
        handover.end_step()
    assert found == [True, False, False, False, True]


@contextmanager
def in_thread(function: object, *arguments: object) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(function, *arguments)  # type: ignore[arg-type]


def test_a_sequence_of_one_advantage_is_one_row_of_all_its_tokens() -> None:
    [row] = build_rows([build_sequence([0.5, 0.5])])
    assert row.advantage == 0.5
    assert row.loss_mask.tolist() == [False, False, True, True]


def test_rewards_on_the_way_make_a_row_per_advantage_that_train_each_token_once() -> None:
    rows = list(build_rows([build_sequence([0.5, -1.0, 0.5])]))
    assert [(row.advantage, np.flatnonzero(row.loss_mask).tolist()) for row in rows] == [(0.5, [2, 4]), (-1.0, [3])]


def test_a_first_token_that_nothing_predicts_is_in_no_row() -> None:
    sequence = msgspec.structs.replace(build_sequence([]), loss_mask=np.array([True, False]))
    assert list(build_rows([sequence])) == []


def test_a_batch_ends_with_a_step_and_fillers_stand_between_its_rows(handover: Handover) -> None:
    handover.give(build_batch(6), FILLER, is_last=False)
    rows = take_all(handover)
    assert [row.is_filler for row in rows] == [False, False, False, True, False, False, False, True]
    assert [row.episode_id for row in rows if not row.is_filler] == [f"e{index}" for index in range(6)]


def test_a_filler_is_a_token_that_was_sampled_with_as_few_before_it_as_there_are() -> None:
    short = build_sequence([1.0, 1.0], "short")
    long = msgspec.structs.replace(build_sequence([1.0] * 3, "long"), loss_mask=np.array([False] * 4 + [True]))
    filler = build_filler([*build_rows([long, short])])
    assert (filler.episode_id, filler.ids.tolist(), filler.loss_mask.tolist()) == ("short", [0, 1, 2], [False, False, True])
    assert (filler.logprobs[-1], filler.advantage) == (-0.5, 0.0)


def test_a_batch_without_a_row_takes_a_step_of_fillers(handover: Handover) -> None:
    handover.give([], FILLER, is_last=False)
    assert [row.is_filler for row in take_all(handover)] == [True] * ROWS


def test_a_batch_is_trained_after_its_last_step(handover: Handover) -> None:
    batch = handover.give(build_batch(2 * ROWS), FILLER, is_last=False)
    handover.end_step()
    with in_thread(handover.wait_trained, batch) as waiting:
        assert not waiting.done()
        handover.end_step()
        waiting.result(5)


def test_a_checkpoint_that_was_asked_for_is_made_after_its_batch_alone(handover: Handover) -> None:
    handover.give(build_batch(ROWS), FILLER, is_last=False)
    second = handover.give(build_batch(2 * ROWS), FILLER, is_last=False)
    handover.request_save(second)
    handover.give(build_batch(ROWS), FILLER, is_last=False)
    assert [handover.end_step() for _ in range(4)] == [
        StepEnd(save=False, stop=False),
        StepEnd(save=False, stop=False),
        StepEnd(save=True, stop=False),
        StepEnd(save=False, stop=False),
    ]


def test_a_checkpoint_that_nobody_asked_for_is_not_taken_for_one_that_was(handover: Handover, tmp_path: Path) -> None:
    first = handover.give(build_batch(2 * ROWS), FILLER, is_last=False)
    handover.request_save(first)
    handover.end_step()
    handover.save(tmp_path / "checkpoint-1")  # the trainer's own habit, in the middle of the batch
    handover.end_step()
    with in_thread(handover.wait_saved, first) as waiting:
        handover.save(tmp_path / "checkpoint-2")
        assert waiting.result(5) == tmp_path / "checkpoint-2"


def test_the_last_batch_is_followed_by_what_the_trainer_takes_ahead_and_ends_it(handover: Handover, tmp_path: Path) -> None:
    handover.give(build_batch(ROWS), FILLER, is_last=True)
    assert [row.is_filler for row in take_all(handover)] == [False] * ROWS + [True] * 2
    assert handover.end_step() == StepEnd(save=True, stop=True)
    assert not handover.is_complete
    handover.save(tmp_path)
    assert handover.is_complete


def test_the_checkpoint_before_the_last_one_is_found_by_who_asks_late_for_it(handover: Handover, tmp_path: Path) -> None:
    first = handover.give(build_batch(ROWS), FILLER, is_last=False)
    handover.request_save(first)
    last = handover.give(build_batch(ROWS), FILLER, is_last=True)
    for batch in (first, last):
        assert handover.end_step().save
        handover.save(tmp_path / f"checkpoint-{batch}")
    with in_thread(handover.wait_saved, first) as waiting:
        try:
            assert waiting.result(5) == tmp_path / f"checkpoint-{first}"
        finally:
            handover.close("the test has ended")


def test_a_checkpoint_of_a_later_step_is_not_taken_for_that_of_the_batch_before_it(handover: Handover, tmp_path: Path) -> None:
    first = handover.give(build_batch(ROWS), FILLER, is_last=False)
    handover.request_save(first)
    handover.give(build_batch(2 * ROWS), FILLER, is_last=False)
    handover.end_step()
    handover.save(tmp_path / "checkpoint-1")
    handover.request_save(first)  # once more, after the disk was full
    handover.end_step()
    handover.save(tmp_path / "checkpoint-2")
    assert handover.wait_saved(first) == tmp_path / "checkpoint-1"


def test_fillers_stand_for_a_batch_that_does_not_come_and_the_next_one_begins_behind_them(
    handover: Handover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)
    first = handover.give(build_batch(ROWS), FILLER, is_last=False)
    handover.request_save(first)
    with in_thread(handover.wait_saved, first) as waiting:
        rows = [handover.take(5) for _ in range(ROWS + 2)]
        assert [row.is_filler for row in rows] == [False] * ROWS + [True] * 2
        assert handover.end_step().save
        handover.save(tmp_path)
        assert waiting.result(5) == tmp_path
    second = handover.give(build_batch(2), FILLER, is_last=False)
    assert [row.is_filler for row in take_all(handover)] == [False, False]  # with the two before it makes a step
    handover.end_step()
    handover.wait_trained(second)


def test_no_fillers_come_while_there_are_rows_to_train(
    handover: Handover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take minutes, and the next batch be there before it has ended."""
    monkeypatch.setattr(module, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)
    first = handover.give(build_batch(ROWS), FILLER, is_last=False)
    handover.request_save(first)
    with in_thread(handover.wait_saved, first) as waiting:
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        handover.give(build_batch(ROWS), FILLER, is_last=False)
        assert not any(row.is_filler for row in take_all(handover))
        handover.end_step()
        handover.save(tmp_path)
        assert waiting.result(5) == tmp_path


def test_who_waits_is_told_that_the_trainer_has_ended(handover: Handover) -> None:
    batch = handover.give(build_batch(ROWS), FILLER, is_last=False)
    with in_thread(handover.wait_trained, batch) as waiting:
        handover.close("it was killed")
        with pytest.raises(TrainerEnded, match="it was killed"):
            waiting.result(5)
    with pytest.raises(TrainerEnded):
        handover.give(build_batch(ROWS), FILLER, is_last=False)


def test_who_takes_rows_is_not_left_waiting_when_no_more_is_trained(handover: Handover) -> None:
    with in_thread(handover.take, None) as waiting:
        handover.close("it was interrupted")
        with pytest.raises(queue.Empty):
            waiting.result(5)


def test_a_row_that_does_not_come_is_an_empty_queue(handover: Handover) -> None:
    with pytest.raises(queue.Empty):
        handover.take(0.01)


@pytest.fixture
def trainer(handover: Handover, tmp_path: Path) -> HandoverTrainer:
    return HandoverTrainer(handover, SentWeights(tmp_path / "weights"), steps=2)


def test_a_step_returns_when_the_batch_before_is_trained_and_the_last_one_when_it_is_itself(
    handover: Handover, trainer: HandoverTrainer
) -> None:
    handover.begin(0)
    batch = [build_sequence([1.0], f"e{index}") for index in range(ROWS)]
    trainer.train(batch, version=0, progress=0.0)
    with in_thread(lambda: trainer.train(batch, version=1, progress=0.5)) as training:
        handover.end_step()
        with pytest.raises(TimeoutError):
            training.result(0.05)
        handover.end_step()
        assert training.result(5)["tokens"] == ROWS  # type: ignore[index]


def test_a_batch_of_which_nothing_is_trained_is_a_step_too(handover: Handover, trainer: HandoverTrainer) -> None:
    handover.begin(0)
    assert trainer.train([], version=0, progress=0.0)["tokens"] == 0
    assert {(row.is_filler, *row.ids) for row in take_all(handover)} == {(True, 0, 0)}


def write_state(folder: Path, checkpoint: Path, state_of_trainer: dict[str, object] | None = None) -> None:
    folder.mkdir()
    checkpoint.mkdir()
    if state_of_trainer is not None:
        (checkpoint / "trainer_state.json").write_bytes(msgspec.json.encode(state_of_trainer))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "optimizer.pt").write_bytes(b"moments")
    state = TrainerState(folder=str(checkpoint), step=int(checkpoint.name.rpartition("-")[2]), sha256=hash_files(checkpoint))
    (folder / STATE).write_bytes(msgspec.json.encode(state))


def test_a_trainer_that_began_elsewhere_than_the_run_is_refused(
    handover: Handover, trainer: HandoverTrainer, tmp_path: Path
) -> None:
    write_state(tmp_path / "state", tmp_path / "checkpoint-7")
    handover.begin(0)
    with pytest.raises(UserError, match=r"began after 0 of its steps, the run goes on after 7: give it the checkpoint .*-7"):
        trainer.restore(tmp_path / "state")


@pytest.mark.parametrize("logged", [[{"loss": 0.5, "step": 7}], [{"loss": 0.25, "step": 7}], []])
def test_a_trainer_that_began_from_another_runs_checkpoint_of_that_step_is_refused(
    handover: Handover, trainer: HandoverTrainer, tmp_path: Path, logged: list[dict[str, float]]
) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    write_state(tmp_path / "state", checkpoint, {"log_history": [{"loss": 0.25, "step": 7}]})
    handover.begin(7, format_history(logged))
    if format_history(logged) == read_history(checkpoint):
        trainer.restore(tmp_path / "state")
        return
    with pytest.raises(UserError, match=r"from another checkpoint than .*checkpoint-7: give it that one"):
        trainer.restore(tmp_path / "state")


def test_a_trainer_that_began_with_steps_which_the_run_does_not_know_is_refused(
    handover: Handover, trainer: HandoverTrainer
) -> None:
    handover.begin(7)
    with pytest.raises(UserError, match="began after 7 of its steps, but the run has no checkpoint"):
        trainer.train([build_sequence([1.0])], version=0, progress=0.0)


@pytest.mark.parametrize("damage", ["change", "remove", "folder"])
def test_a_checkpoint_of_the_trainers_that_is_not_as_it_was_stored_is_named(tmp_path: Path, damage: str) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    write_state(tmp_path / "state", checkpoint)
    assert read_state(tmp_path / "state").step == 7
    if damage == "change":
        (checkpoint / "optimizer.pt").write_bytes(b"others")
    elif damage == "remove":
        (checkpoint / "optimizer.pt").unlink()
    else:
        checkpoint.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be read" if damage == "folder" else r"not as it was stored: optimizer\.pt"):
        read_state(tmp_path / "state")


def test_parts_of_a_sharded_checkpoint_are_checked_like_its_files(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    (checkpoint / "optimizer_0").mkdir(parents=True)
    (checkpoint / "optimizer_0/__0_0.distcp").write_bytes(b"moments")
    assert list(hash_files(checkpoint)) == ["optimizer_0/__0_0.distcp"]


def test_the_model_is_saved_without_what_training_needs(handover: Handover, trainer: HandoverTrainer, tmp_path: Path) -> None:
    write_state(tmp_path / "state", tmp_path / "checkpoint-7")
    handover.begin(7)
    trainer.restore(tmp_path / "state")
    trainer.save_model(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_rows_come_as_soon_as_they_are_given(handover: Handover) -> None:
    with in_thread(handover.take, None) as waiting:
        handover.give(build_batch(ROWS), FILLER, is_last=False)
        assert waiting.result(5).episode_id == "e0"  # type: ignore[attr-defined]
