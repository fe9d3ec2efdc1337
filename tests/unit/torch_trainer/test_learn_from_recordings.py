"""A model fine-tuned on rewarded episodes of a recording: which are taken, what is learned, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.claim_seals import make_seal
from fleetbus.errors import UserError
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_workers.cli.train.learn import command
from fleetbus_workers.learner.fine_tuning import fine_tune, negative_log_likelihood
from fleetbus_workers.learner.rejection_sampling import select_rewarded
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.log_builder import PROMPT, SAMPLED, SUBJECTS, LogBuilder
from tests.support.trainable_model import compute_distance, compute_gradient
from tests.support.trainer_settings import trainer_settings


def record(file: Path, log: LogBuilder, configuration: dict[str, Any] | None = None) -> Path:
    entries = [
        StreamEntry(sequence=number, subject=subject, payload=payload, time_ns=number)
        for number, (subject, payload) in enumerate(log.entries, start=1)
    ]
    with create_recording(file, RecordingHeader(run=SUBJECTS.run, configuration=configuration or {})) as writer:
        writer.add(entries)
    return file


def played(**rewards: float | None) -> LogBuilder:
    log = LogBuilder()
    for name, reward in rewards.items():
        log.play(name, reward=reward)
    return log


def test_training_episodes_with_enough_reward_are_taken_token_by_token(tmp_path: Path) -> None:
    log = played(good=1.0, bad=0.0, half=0.5, ungraded=None)
    log.play("held_out", split="eval", reward=1.0)

    found = select_rewarded([record(tmp_path / "r.fbrec", log)], min_reward=0.5, vocabulary=64)

    assert [sequence.episode_id for sequence in found.sequences] == ["good", "half"]
    assert found.left_out == {"reward below the threshold": 1} and not found.torn
    sequence = found.sequences[0]
    assert len(sequence.ids) == 2 * (PROMPT + SAMPLED) and int(sequence.loss_mask.sum()) == 2 * SAMPLED
    assert set(sequence.advantages[sequence.loss_mask]) == {1.0}


@pytest.mark.parametrize("first", [{"opens": "00" * 16}, {"outcome": "cancelled", "reward": None}])
def test_what_stands_behind_an_episodes_first_result_is_not_trained(tmp_path: Path, first: dict[str, Any]) -> None:
    """An environment worker's key can store more results of an episode that has one, and claim it once more."""
    log = LogBuilder()
    for episode in ("again", "claimed_again"):
        log.request(episode)
        log.claim(episode, seal=make_seal("5f" * 16))
        log.observe(episode, 0)
        actions = [log.act(episode, 0)]
        log.finish(episode, actions, **first)
        if episode == "claimed_again":
            log.claim(episode, attempt=2)
        log.finish(episode, actions)

    assert not select_rewarded([record(tmp_path / "r.fbrec", log)], min_reward=0.5, vocabulary=64).sequences


def test_of_a_task_no_more_are_taken_than_asked_for(tmp_path: Path) -> None:
    found = select_rewarded(
        [record(tmp_path / "r.fbrec", played(a=1.0, b=1.0, c=1.0))], min_reward=1.0, per_task=2, vocabulary=64
    )
    assert found.episodes == 2 and found.left_out == {"enough episodes of its task": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 3}, "its numbers do not fit each other"),
        ({"loss_mask": bytes(3)}, "its numbers do not fit each other"),
        ({"loss_mask": b"\xff" * 3}, "its numbers do not fit each other"),
    ],
)
def test_an_episode_that_contradicts_itself_is_left_out_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    log = LogBuilder()
    log.finish("lying", [log.act("lying", 0)], **changes)
    log.finish("cut", [999])
    log.play("good", reward=1.0)
    found = select_rewarded([record(tmp_path / "r.fbrec", log)], min_reward=1.0, vocabulary=64)
    assert [each.episode_id for each in found.sequences] == ["good"] and found.left_out == {
        reason: 1,
        "actions are not in the recording": 1,
    }


def test_tokens_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    found = select_rewarded([record(tmp_path / "r.fbrec", played(a=1.0))], min_reward=1.0, vocabulary=1)
    assert found.left_out == {"it has tokens that the model does not have": 1}


def test_what_is_learned_is_the_likelihood_of_the_sampled_tokens(folder: Path, tmp_path: Path) -> None:
    sequences = select_rewarded([record(tmp_path / "r.fbrec", played(a=1.0, b=1.0))], min_reward=1.0, vocabulary=64).sequences
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total, tokens = torch.zeros(()), 0
    for each in sequences:
        ids = torch.from_numpy(each.ids.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        total = total - logprobs[torch.from_numpy(each.loss_mask[1:])].sum()
        tokens += int(each.loss_mask.sum())
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    settings = trainer_settings(max_grad_norm=1e9, learning_rate=1e-3, warmup_steps=1)
    found = compute_gradient(TorchTrainer(folder, settings=settings, objective=negative_log_likelihood), sequences)

    assert compute_distance(found, expected) < 1e-4
    losses: list[float] = []
    fine_tune(
        folder, sequences, tmp_path / "made", settings=settings, epochs=8, batch=1, seed=0,
        report=lambda step, steps, loss: losses.append(loss),
    )  # fmt: skip
    assert len(losses) == 16 and losses[-1] < 0.6 * losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made").config.vocab_size == 64
    with pytest.raises(UserError, match="is there already"):
        fine_tune(folder, sequences, tmp_path / "made", settings=settings, epochs=1, batch=1, seed=0, report=lambda *_: None)


def learn(file: Path, folder: Path, output: Path, *more: str) -> Any:
    arguments = ["--from", str(file), "--model", str(folder), "--output", str(output), *more]
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_the_command_writes_a_model_and_runs_nothing_that_the_recording_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text("from pathlib import Path; Path('ran').touch()")
    planted = {"algorithm": {"loss": "planted:f", "advantage": "planted:f"}, "run": {"environment": "planted:C"}}
    file = record(tmp_path / "r.fbrec", played(a=1.0, b=0.0), planted)

    result = learn(file, folder, tmp_path / "made", "--epochs", "2")

    assert result.return_value == 0, result
    assert "1 episodes, 1 sequences, learning rate 1e-05" in result.output and "step 2 of 2: loss" in result.output
    assert (tmp_path / "made/model.safetensors").is_file() and not (tmp_path / "ran").exists()


def test_a_recording_without_rewarded_episodes_and_a_file_that_is_none_are_refused(folder: Path, tmp_path: Path) -> None:
    result = learn(record(tmp_path / "r.fbrec", played(bad=0.0)), folder, tmp_path / "made")
    assert isinstance(result.exception, UserError) and "no training episode has a reward of 1" in str(result.exception)
    (tmp_path / "none.fbrec").write_bytes(b"nothing")
    assert isinstance(learn(tmp_path / "none.fbrec", folder, tmp_path / "made").exception, UserError)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("output", "more", "said"),
    [
        ("/proc/made", (), "cannot write below /proc"),
        ("made", ("--min-reward", "nan"), "--min-reward must be a number"),
        ("made", ("--min-reward", "inf"), "--min-reward must be a number"),
    ],
)
def test_what_cannot_end_well_is_refused_before_anything_is_trained(
    folder: Path, tmp_path: Path, output: str, more: tuple[str, ...], said: str
) -> None:
    result = learn(record(tmp_path / "r.fbrec", played(a=1.0)), folder, tmp_path / output, *more)
    assert isinstance(result.exception, UserError) and said in str(result.exception)
    assert "step" not in result.output and not (tmp_path / "made").exists()
