"""Our formulae beside TRL's own trainers on the same numbers, to 1e-6. Opt-in: `just test-trl` installs TRL beside the project.

TRL's code is run as it is: a real trainer samples, grades and computes advantages; its loss gets log-probabilities drawn here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.rewards import get_soft_overlong_punishment

import torch

from fleetbus.core.algorithms.advantages import dr_grpo, grpo, grpo_batch, rloo
from fleetbus.core.algorithms.corrections import CORRECTIONS
from fleetbus.core.algorithms.losses import LossPlan, compute_token_losses, reduce_losses
from fleetbus.core.algorithms.objectives import Clip
from fleetbus.core.algorithms.shaping import overlong_penalty

pytestmark = pytest.mark.filterwarnings("ignore")

STARTER = Path(__file__).resolve().parents[2] / "workers/fleetbus_workers/starter/policy"
REWARDS = [1.0, 0.0, 0.0, 0.25, 0.5, 1.0, 0.75, 1.0]
GROUPS = np.array([0] * 4 + [1] * 4)
LENGTH = 5


def reward(completions: list[str], **_: Any) -> list[float]:
    return REWARDS[: len(completions)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a trainer of TRL with these settings."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dataset = Dataset.from_dict({"prompt": ["one", "two"]})
    folder = tmp_path_factory.mktemp("trl")

    def made(trainer: Any, config: Any, **settings: Any) -> Any:
        arguments = config(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=LENGTH,
            use_cpu=True,
            report_to=[],
            **settings,
        )
        return trainer(
            model=str(STARTER), reward_funcs=reward, args=arguments, train_dataset=dataset, processing_class=tokenizer
        )

    return made


def advantages_of(trainer: Any) -> np.ndarray:
    prompts = [{"prompt": "one"}] * 4 + [{"prompt": "two"}] * 4
    found: np.ndarray = trainer._generate_and_score_completions(prompts)["advantages"].numpy()
    return found


@pytest.mark.parametrize(("scale", "ours"), [("group", grpo), ("none", dr_grpo), ("batch", grpo_batch)])
def test_group_relative_advantages_are_trls(make: Any, scale: str, ours: Any) -> None:
    trainer = make(GRPOTrainer, GRPOConfig, scale_rewards=scale)

    np.testing.assert_allclose(advantages_of(trainer), ours(np.array(REWARDS), GROUPS), atol=1e-6)


def test_leave_one_out_advantages_are_trls(make: Any) -> None:
    trainer = make(RLOOTrainer, RLOOConfig, normalize_advantages=False)

    np.testing.assert_allclose(advantages_of(trainer), rloo(np.array(REWARDS), GROUPS), atol=1e-6)


def test_the_soft_overlong_punishment_is_trls() -> None:
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [1, 79, 80, 81, 95, 100, 101, 500]

    theirs = punish(completion_ids=[[1] * length for length in lengths])

    assert [overlong_penalty(length, limit=100, buffer=20) for length in lengths] == pytest.approx(theirs, abs=1e-6)


@pytest.fixture(scope="module")
def numbers() -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(-1, 0.5, (8, LENGTH)) for name in ("logprobs", "proximal", "sampler", "reference")}
    mask = np.arange(LENGTH)[None] < draw.integers(1, LENGTH + 1, 8)[:, None]
    advantages = np.broadcast_to(draw.normal(0, 1, (8, 1)), (8, LENGTH))
    return {name: torch.tensor(array) for name, array in (arrays | {"mask": mask * 1.0, "advantages": advantages}).items()}


@pytest.fixture(scope="module")
def trainer(make: Any) -> Any:
    made = make(GRPOTrainer, GRPOConfig)
    made.model.eval()  # one batch, not accumulated
    return made


def theirs(trainer: Any, numbers: dict[str, torch.Tensor], **attributes: Any) -> torch.Tensor:
    """TRL's loss of these log-probabilities, and the gradient that they get from it."""
    logprobs = numbers["logprobs"].clone().requires_grad_()
    mask = numbers["mask"]
    defaults = {"loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "use_vllm": False}
    defaults |= {"epsilon_low": 0.2, "epsilon_high": 0.28}
    for name, value in (defaults | attributes).items():
        if name == "delta":
            trainer.args.delta = value
        elif name != "ratio":
            setattr(trainer, name, value)
    trainer.args.use_bias_correction_kl = False  # TRL's default also weighs the KL by the ratio
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.ones((8, LENGTH), dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": numbers["advantages"][:, 0],
        "old_per_token_logps": numbers["proximal"],
        "ref_per_token_logps": numbers["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": attributes.get("ratio"),
        "sampling_per_token_logps": numbers["sampler"],
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    trainer.args.delta = None
    assert logprobs.grad is not None
    return torch.cat([loss.detach()[None], logprobs.grad.flatten()])


def ours(plan: LossPlan, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
    logprobs = numbers["logprobs"].clone().requires_grad_()
    mask = numbers["mask"]
    losses = compute_token_losses(plan, **{**numbers, "logprobs": logprobs})
    loss = reduce_losses(plan, losses, mask, tokens=float(mask.sum()), sequences=8.0)
    loss.backward()
    assert logprobs.grad is not None
    return torch.cat([loss.detach()[None], logprobs.grad.flatten()])


@pytest.mark.parametrize(
    ("plan", "attributes"),
    [
        (LossPlan(reduction="token_mean"), {"loss_type": "dapo"}),
        (LossPlan(reduction="token_mean", clip=Clip(low=0.2, high=0.2)), {"loss_type": "bnpo", "epsilon_high": 0.2}),
        (LossPlan(reduction="sequence_mean"), {"loss_type": "grpo"}),
        (LossPlan(reduction="constant_mean", loss_scale_factor=LENGTH), {"loss_type": "dr_grpo"}),
        (LossPlan(reduction="sequence_sum"), {"loss_type": "luspo"}),
        (LossPlan(reduction="token_mean", clip=Clip(low=0.2, high=0.28, dual=1.5)), {"loss_type": "dapo", "delta": 1.5}),
        (
            LossPlan(objective="gspo", reduction="sequence_mean"),
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        (
            LossPlan(objective="cispo", reduction="token_mean", clip=Clip(low=1.0, high=0.5)),
            {"loss_type": "cispo", "epsilon_high": 1.5},
        ),
        (LossPlan(reduction="token_mean", kl_coefficient=0.04), {"loss_type": "dapo", "beta": 0.04}),
    ],
    ids=["dapo", "bnpo", "grpo", "dr_grpo", "luspo", "dual clip", "gspo", "cispo", "kl k3"],
)
def test_losses_and_their_gradients_are_trls(trainer: Any, numbers: Any, plan: LossPlan, attributes: dict[str, Any]) -> None:
    plan = msgspec.structs.replace(plan, old_policy="trainer")

    torch.testing.assert_close(ours(plan, numbers), theirs(trainer, numbers, **attributes), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rollout_correction", ["tis", "tis_sequence", "icepop", "mis_sequence"])
def test_corrected_losses_are_trls(trainer: Any, numbers: Any, rollout_correction: str) -> None:
    """TRL weighs its loss by a ratio that it bounds while it scores completions; the same bounds are applied here."""
    mask = numbers["mask"]
    difference = (numbers["proximal"] - numbers["sampler"]) * mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if "sequence" in rollout_correction else difference)
    bounded = (
        ratio.clamp(max=2.0) if rollout_correction.startswith("tis") else ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0)
    )
    plan = LossPlan(
        reduction="token_mean",
        rollout_correction=rollout_correction,  # type: ignore[arg-type]
        rollout_correction_low=0.5,
        rollout_correction_high=2.0,
    )

    found = theirs(trainer, numbers, use_vllm=True, vllm_importance_sampling_correction=True, ratio=bounded)

    torch.testing.assert_close(ours(plan, numbers), found, atol=1e-6, rtol=1e-6)
    assert CORRECTIONS[rollout_correction](difference, mask, low=0.5, high=2.0).shape == mask.shape
