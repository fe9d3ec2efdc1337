"""Batches of one sampled turn each, and a trainer that clips nothing: what the options of the torch trainer are compared on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import VOCABULARY, compute_logprobs, make_sequence
from tests.support.trainer_settings import trainer_settings

PROMPT = 20


def make_batch(
    folder: Path, *, count: int = 9, seed: int = 0, off_policy: float = 0.2, shared: bool = False
) -> list[TrainingSequence]:
    """One sampled turn each after prompts of their own, or one ``shared`` by all; the model's log-probabilities, disturbed by
    ``off_policy``."""
    draw = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = []
    for index in range(count):
        ids = draw.integers(3, VOCABULARY, PROMPT + int(draw.integers(5, 40))).astype(np.int32)
        if shared:
            ids[: PROMPT - 1] = np.arange(3, PROMPT + 2)
        mask = np.arange(len(ids)) >= PROMPT
        logprobs = np.concatenate([[0.0], compute_logprobs(model, ids)])
        logprobs[1:] += off_policy * draw.normal(size=len(ids) - 1)
        batch.append(make_sequence(index, ids, mask, logprobs=logprobs, advantage=draw.normal()))
    return batch


def trainer(folder: Path, **settings: Any) -> TorchTrainer:
    return TorchTrainer(folder, settings=trainer_settings(max_grad_norm=1e9, micro_batch_size=4, **settings))
