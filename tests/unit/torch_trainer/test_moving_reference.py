"""The reference that follows the policy: what it is made of, what it pulls to, and that a checkpoint keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.errors import UserError
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.sampled_turns import make_batch, trainer

MOVING: dict[str, Any] = {
    "kl_coefficient": 0.5, "kl_reference": "moving", "kl_ratio_weight": True, "learning_rate": 1e-2, "warmup_steps": 0
}  # fmt: skip


def get_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(given: TorchTrainer, folder: Path, steps: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """The weights after each step."""
    after = []
    for step in range(first, first + steps):
        given.train(make_batch(folder, seed=step), version=3, progress=0.0)
        after.append(get_weights(given._model))
    return after


@pytest.mark.parametrize(("every", "alpha"), [(1, 0.25), (2, 0.25), (1, 1.0)])
def test_it_is_the_weighted_sum_of_the_models_that_it_followed(folder: Path, every: int, alpha: float) -> None:
    moving = trainer(folder, **MOVING, reference_sync_steps=every, reference_mixup_alpha=alpha)
    start = get_weights(moving._model)

    followed = train(moving, folder, 5)[every - 1 :: every]

    count = len(followed)
    for name, weights in get_weights(moving._reference.model).items():
        expected = (1 - alpha) ** count * start[name]
        for number, each in enumerate(followed, 1):
            expected = expected + alpha * (1 - alpha) ** (count - number) * each[name]
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
        assert every == 1 or not torch.equal(weights, start[name])


def test_one_that_is_the_policy_itself_pulls_nowhere_and_the_start_does(folder: Path) -> None:
    batch = make_batch(folder, off_policy=0.0)
    still = [msgspec.structs.replace(sequence, advantages=np.zeros_like(sequence.advantages)) for sequence in batch]
    norms = {}
    for name in ("moving", "start"):
        pulled = trainer(folder, **MOVING | {"kl_reference": name, "kl_estimator": "k2"}, reference_mixup_alpha=1.0)
        pulled.train(batch, version=3, progress=0.0)
        norms[name] = pulled.train(still, version=3, progress=0.0)["grad_norm"]

    assert norms["moving"] == pytest.approx(0.0, abs=1e-5)
    assert norms["start"] > 1e-2


@pytest.mark.integration
def test_a_resumed_run_is_pulled_to_the_same_model(folder: Path, tmp_path: Path) -> None:
    settings = MOVING | {"reference_sync_steps": 2, "reference_mixup_alpha": 0.5}
    whole, broken, resumed = (trainer(folder, **settings) for _ in range(3))
    train(whole, folder, 6)
    train(broken, folder, 3)
    broken.start_checkpoint(tmp_path)()

    resumed.restore(tmp_path)
    train(resumed, folder, 3, first=3)

    for model in ("_model", "model"):
        expected, found = ((each if model == "_model" else each._reference).__dict__[model] for each in (whole, resumed))
        for name, weights in get_weights(expected).items():
            torch.testing.assert_close(get_weights(found)[name], weights, atol=0, rtol=0)


def test_a_checkpoint_of_a_run_without_one_is_refused(folder: Path, tmp_path: Path) -> None:
    trainer(folder).start_checkpoint(tmp_path)()

    with pytest.raises(UserError, match="reference"):
        trainer(folder, **MOVING).restore(tmp_path)


def test_it_is_the_model_that_is_saved_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    found = {}
    for chosen in ("policy", "reference"):
        moving = trainer(folder, **MOVING, reference_mixup_alpha=0.5, saved_model=chosen)
        train(moving, folder, 2)
        (tmp_path / chosen).mkdir()
        moving.save_model(tmp_path / chosen)
        found[chosen] = get_weights(AutoModelForCausalLM.from_pretrained(tmp_path / chosen))
    for name, weights in get_weights(moving._reference.model).items():
        torch.testing.assert_close(found["reference"][name], weights, atol=0, rtol=0)
    for name, weights in get_weights(moving._model).items():
        torch.testing.assert_close(found["policy"][name], weights, atol=0, rtol=0)

    with pytest.raises(UserError, match=r"saved_model = reference needs .*kl_reference = moving"):
        trainer(folder, kl_coefficient=0.1, kl_reference="start", saved_model="reference")


def test_adapters_leave_nothing_that_could_follow(folder: Path) -> None:
    with pytest.raises(UserError, match=r"kl_reference = moving .* trainer\.lora_rank = 0"):
        trainer(folder, **MOVING, lora_rank=2)
