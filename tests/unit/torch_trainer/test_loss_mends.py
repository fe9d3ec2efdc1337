"""Single numbers that would spoil a step: gaps that overflow, sequences that are not finite, and what counts as clipped."""

from __future__ import annotations

import filecmp
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fleetbus.config.check import check_configuration
from fleetbus.config.settings import AlgorithmSettings, Configuration, LearnerSettings
from fleetbus.core.algorithms.corrections import CORRECTIONS, KL_ESTIMATORS
from fleetbus.core.algorithms.objectives import OBJECTIVES, Clip, find_clipped
from fleetbus.errors import UserError
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import VOCABULARY, compute_distance, compute_gradient, make_sequence
from tests.support.trainer_settings import trainer_settings

CLIP = Clip(low=0.2, high=0.28)


@pytest.mark.parametrize("gap", [-200.0, -89.0, 89.0, 200.0])
def test_a_gap_beyond_what_float32_holds_stays_finite_with_its_gradient(gap: float) -> None:
    old = torch.tensor([[-1.0, -1.0]])
    mask, advantages = torch.ones(1, 2), torch.tensor([[1.0, -1.0]])
    for name, objective in OBJECTIVES.items():
        logprobs = torch.tensor([[-1.0, -1.0 + gap]], requires_grad=True)
        losses = objective(logprobs, old, advantages, mask, CLIP)
        losses.sum().backward()
        assert logprobs.grad is not None and losses.isfinite().all() and logprobs.grad.isfinite().all(), name
    for name, correction in CORRECTIONS.items():
        assert correction(torch.tensor([[0.0, gap]]), mask, low=0.5, high=2.0).isfinite().all(), name
    for name, estimator in KL_ESTIMATORS.items():
        assert estimator(torch.tensor([-1.0]), torch.tensor([-1.0 + gap])).isfinite().all(), name


def test_a_token_far_below_its_reference_is_still_pulled_back() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    KL_ESTIMATORS["k3"](logprobs, torch.tensor([-60.0])).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(1.0)


def test_what_each_objective_limits_is_counted_as_it_limits_it() -> None:
    old = torch.log(torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
    new = torch.log(torch.tensor([[0.75, 0.4], [0.101, 0.95]]))
    mask, advantages = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [-1.0, 1.0]])

    def clipped(name: str, clip: Clip = CLIP) -> list[list[bool]]:
        found: list[list[bool]] = find_clipped(name, new, old, advantages, mask, clip).tolist()
        return found

    assert clipped("ppo_clip") == [[True, False], [False, False]]
    assert clipped("cispo") == [[True, False], [False, False]]
    sequence = math.sqrt(1.5 * 0.8)
    assert clipped("gspo", Clip(low=0.2, high=sequence - 1.01)) == [[True, True], [False, False]]
    assert clipped("dppo_tv", Clip(low=0.2, high=0.04)) == [[True, False], [False, True]]


def sequences(count: int) -> list[TrainingSequence]:
    draw = np.random.default_rng(0)
    found = []
    for index in range(count):
        ids = draw.integers(3, VOCABULARY, 20).astype(np.int32)
        mask = np.arange(20) >= 8
        found.append(make_sequence(index, ids, mask, logprobs=np.full(20, -4.0), advantage=draw.normal()))
    return found


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def test_one_sequence_with_a_nan_leaves_the_update_of_the_others_as_it_is(folder: Path, tmp_path: Path, field: str) -> None:
    batch = sequences(5)
    values = getattr(batch[2], field).copy()
    values[10] = math.nan
    spoilt = [*batch[:2], msgspec.structs.replace(batch[2], **{field: values}), *batch[3:]]
    one, other = (TorchTrainer(folder, settings=trainer_settings()) for _ in range(2))
    measured = one.train(spoilt, version=0, progress=0.0)
    other.train([*batch[:2], *batch[3:]], version=0, progress=0.0)
    one.save_weights(tmp_path / "one")
    other.save_weights(tmp_path / "other")
    assert measured["sequences_excluded"] == 1 and measured["skipped_updates"] == 0
    assert filecmp.cmp(tmp_path / "one", tmp_path / "other", shallow=False)
    with pytest.raises(ValueError, match="e2"):
        one.train([spoilt[2]], version=0, progress=0.0)


def untrained(count: int, length: int) -> list[TrainingSequence]:
    ids, nothing = np.full(length, 3, np.int32), np.zeros(length, np.bool_)
    return [
        make_sequence(100 + index, ids, nothing, logprobs=np.zeros(length), advantage=0.0, group="u") for index in range(count)
    ]


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"share_prefix": False},
        {"packing": True, "token_budget": 64},
        {"advantage_estimator": "gae"},
        {"teacher": "FOLDER", "teacher_coefficient": 0.5},
    ],
    ids=["branches", "padded", "packed", "critic", "teacher"],
)
def test_a_batch_without_a_trained_token_is_trained_with_finite_metrics(
    folder: Path, choice: dict[str, Any], length: int
) -> None:
    choice = {name: str(folder) if value == "FOLDER" else value for name, value in choice.items()}
    measured = TorchTrainer(folder, settings=trainer_settings(**choice)).train(untrained(3, length), version=3, progress=0.0)
    assert all(map(math.isfinite, measured.values())) and measured["tokens"] == measured["grad_norm"] == 0.0


@pytest.mark.parametrize("share", [True, False], ids=["branches", "padded"])
def test_sequences_of_one_token_leave_the_gradient_of_the_others_as_it_is(folder: Path, share: bool) -> None:
    begin = sequences(1)[0].ids[:12]
    batch = [msgspec.structs.replace(each, ids=np.concatenate([begin, each.ids[12:]])) for each in sequences(4)]
    trainer = TorchTrainer(folder, settings=trainer_settings(micro_batch_size=1, share_prefix=share, max_grad_norm=1e9))
    together = compute_gradient(trainer, [*untrained(2, 1), *batch])
    assert compute_distance(together, compute_gradient(trainer, batch)) <= 1e-5


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
def test_an_objective_with_clips_of_another_size_does_not_inherit_those_of_ppo(objective: Any) -> None:
    algorithm = AlgorithmSettings(objective=objective)
    with pytest.raises(UserError, match=rf"algorithm.objective = {objective} takes"):
        check_configuration(Configuration(algorithm=algorithm))
    check_configuration(Configuration(algorithm=algorithm, learner=LearnerSettings(clip_ratio_low=3e-4, clip_ratio_high=4e-4)))
