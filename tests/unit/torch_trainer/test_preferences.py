"""Direct preference optimization from recordings: which episodes are paired, and what is learned of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from fleetbus.errors import UserError
from fleetbus_workers.cli.train.learn import command
from fleetbus_workers.learner.preference_pairs import Pair, select_pairs
from fleetbus_workers.learner.preferences import build_trainer, compute_likelihoods, compute_preferences, prefer, take_step
from tests.support.trainable_model import compute_distance, make_sequence
from tests.support.trainer_settings import trainer_settings
from tests.unit.torch_trainer.test_learn_from_recordings import played, record

PROMPT = 12


def leaf(index: int, seed: int, sampled: int, segment: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, 60, PROMPT + sampled).astype(np.int32)
    made = make_sequence(index, ids, np.arange(len(ids)) >= PROMPT, logprobs=np.full(len(ids), -4.0), advantage=1.0)
    return msgspec.structs.replace(made, segment=segment)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """One of the episodes has two leaves."""
    return [
        Pair(chosen=(leaf(0, 0, 6), leaf(0, 9, 4, 1)), rejected=(leaf(1, 1, 3),)),
        Pair(chosen=(leaf(2, 2, 4),), rejected=(leaf(3, 3, 8),)),
        Pair(chosen=(leaf(4, 4, 5),), rejected=(leaf(5, 5, 5),)),
    ]


def likelihood(model: Any, leaves: tuple[Any, ...]) -> torch.Tensor:
    total = torch.zeros(())
    for each in leaves:
        ids = torch.from_numpy(each.ids.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        total = total + logprobs[torch.from_numpy(each.loss_mask[1:])].sum()
    return total


def test_losses_and_weights_are_those_of_the_sigmoid_and_stay_finite() -> None:
    chosen, rejected = np.array([-3.0, -1.0, 1e5]), np.array([-5.0, -1.0, -1e5])
    losses, weights = compute_preferences(chosen, rejected, np.array([-4.0, -1.0, 0.0]), np.array([-4.0, -1.0, 0.0]), beta=0.5)
    margin = 0.5 * (1.0 - -1.0)
    np.testing.assert_allclose(losses, [np.log1p(np.exp(-margin)), np.log(2.0), 0.0], atol=1e-12)
    np.testing.assert_allclose(weights, [0.5 / (1 + np.exp(margin)), 0.25, 0.0], atol=1e-12)
    assert np.isfinite(compute_preferences(rejected, chosen, chosen * 0, chosen * 0, beta=0.5)).all()


def test_a_step_has_the_gradient_of_the_loss_of_its_pairs(folder: Path, pairs: list[Pair]) -> None:
    """Away from the start, where the reference is another model: by torch's own gradient of -log sigmoid."""
    settings = trainer_settings(max_grad_norm=1e9, micro_batch_size=2, learning_rate=1e-3, warmup_steps=0)
    trainer, beta = build_trainer(folder, settings), 0.7
    reference = compute_likelihoods(trainer, pairs)
    first, _ = take_step(trainer, pairs, reference, beta, 0.0)
    assert first == pytest.approx(np.log(2.0), abs=1e-5)

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(trainer._model.state_dict())
    losses = []
    for pair, (chosen, rejected) in zip(pairs, reference.T, strict=True):
        margin = (likelihood(model, pair.chosen) - chosen) - (likelihood(model, pair.rejected) - rejected)
        losses.append(-torch.nn.functional.logsigmoid(beta * margin))
    expected_loss = torch.stack(losses).mean()
    expected_loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    found: dict[str, torch.Tensor] = {}
    named = list(trainer._model.named_parameters())

    def take() -> None:
        found.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

    trainer._optimizer.step = take  # type: ignore[assignment, method-assign]
    loss, _ = take_step(trainer, pairs, reference, beta, 0.0)

    assert loss == pytest.approx(expected_loss.item(), abs=1e-5) and loss < first
    assert compute_distance(found, expected) < 1e-4


def test_training_prefers_what_was_rewarded_more(folder: Path, pairs: list[Pair], tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []
    settings = trainer_settings(learning_rate=1e-3, warmup_steps=1, max_grad_norm=1.0)
    prefer(
        folder, pairs, tmp_path / "made", settings=settings, beta=0.3, epochs=6, batch=2, seed=0,
        report=lambda step, steps, loss, right: seen.append((loss, right)),
    )  # fmt: skip
    assert len(seen) == 12 and seen[-1][0] < 0.3 and seen[-1][1] == 1.0
    made, start = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (tmp_path / "made", folder))
    with torch.no_grad():
        for pair in pairs:
            gaps = [likelihood(model, pair.chosen) - likelihood(model, pair.rejected) for model in (made, start)]
            assert gaps[0] > gaps[1]
    with pytest.raises(UserError, match="is there already"):
        prefer(folder, pairs, tmp_path / "made", settings=settings, beta=0.3, epochs=1, batch=2, seed=0, report=lambda *_: None)


def test_the_best_of_a_group_is_paired_with_its_worst_and_equals_with_nobody(tmp_path: Path) -> None:
    log = played(a=1.0, b=0.0, c=0.5, d=0.75, e=None, f=0.5)
    found = select_pairs([record(tmp_path / "r.fbrec", log)], min_gap=0.0, vocabulary=64)
    named = [(pair.chosen[0].episode_id, pair.rejected[0].episode_id) for pair in found.pairs]
    assert named == [("a", "b"), ("d", "f")] and found.left_out["its group has an odd number"] == 1
    found = select_pairs([record(tmp_path / "s.fbrec", log)], min_gap=0.5, vocabulary=64)
    assert len(found.pairs) == 1 and found.left_out["no other of its group is rewarded so much less or more"] == 3
    equal = select_pairs([record(tmp_path / "t.fbrec", played(a=1.0, b=1.0))], min_gap=0.0, vocabulary=64)
    assert not equal.pairs


def learn(file: Path, folder: Path, output: Path, *more: str) -> Any:
    arguments = ["--from", str(file), "--model", str(folder), "--output", str(output), *more]
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_the_command_learns_from_pairs_and_refuses_options_of_the_other_method(folder: Path, tmp_path: Path) -> None:
    file = record(tmp_path / "r.fbrec", played(a=1.0, b=0.0))
    result = learn(file, folder, tmp_path / "made", "--method", "dpo", "--epochs", "2", "--beta", "0.5")
    assert result.return_value == 0, result
    assert "1 pairs, 2 sequences, learning rate 1e-05, beta 0.5" in result.output and "step 2 of 2: loss" in result.output
    assert (tmp_path / "made/model.safetensors").is_file()
    refused = learn(file, folder, tmp_path / "other", "--method", "dpo", "--min-reward", "0.5")
    assert isinstance(refused.exception, UserError) and "--min-reward does not go with" in str(refused.exception)
    refused = learn(file, folder, tmp_path / "other", "--beta", "0.5")
    assert isinstance(refused.exception, UserError) and not (tmp_path / "other").exists()
    alike = learn(record(tmp_path / "s.fbrec", played(a=1.0)), folder, tmp_path / "other", "--method", "dpo")
    assert isinstance(alike.exception, UserError) and "no group has two" in str(alike.exception)
