"""Tiny random models for the torch trainer, sequences to train them on, and gradients to compare."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer

VOCABULARY = 64
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2}
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, **LAYERS, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, bos_token_id=None),
    "llama": LlamaConfig(**SIZES, **LAYERS, num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=1),
    "moe": Qwen3MoeConfig(
        **SIZES,
        **LAYERS,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        bos_token_id=None,
    ),
    "gpt2": GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=512, bos_token_id=1),
}


def make_model(folder: Path, kind: str = "qwen3", *, spread: float = 0.1) -> Path:
    """A model of one of `CONFIGS` in ``folder``, its first weights moved by normal noise of that ``spread``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def compute_logprobs(model: Any, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """What the model gives each id after the first, shape [len(ids) - 1]."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0, :-1] / temperature
    following = torch.from_numpy(ids[1:, None].astype(np.int64))
    found: np.ndarray = torch.log_softmax(logits, -1).gather(-1, following)[:, 0].numpy()
    return found


def make_sequence(
    index: int,
    ids: np.ndarray,
    mask: np.ndarray,
    *,
    logprobs: np.ndarray,
    advantage: float,
    group: str = "g",
    version: int = 3,
    temperature: float = 1.0,
) -> TrainingSequence:
    """``logprobs``, one per id, and ``advantage`` count where ``mask`` is true: there tokens were sampled."""
    return TrainingSequence(
        episode_id=f"e{index}",
        group_id=group,
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        temperature=temperature,
    )


def compute_gradient(trainer: TorchTrainer, batch: list[TrainingSequence]) -> dict[str, torch.Tensor]:
    """The gradient of one call, taken where the optimizer would use it, before clipping."""
    taken: dict[str, torch.Tensor] = {}
    step = trainer._optimizer.step

    def take() -> None:
        named = trainer._model.named_parameters()
        taken.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

    trainer._optimizer.step = take  # type: ignore[assignment, method-assign]
    trainer.train(batch, version=3, progress=0.0)
    trainer._optimizer.step = step  # type: ignore[method-assign]
    return taken


def compute_distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two gradients, relative to the second."""
    difference = sum(float((first[name] - second[name]).norm() ** 2) for name in second)
    return math.sqrt(difference / sum(float(value.norm() ** 2) for value in second.values()))


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
