"""The starter model from random weights: it learns to copy, then to imitate the erring expert. Blocking, on the CPU."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from fleetbus_workers.learner.torch.batches import find_shared_prefix, split_micro_batches
from fleetbus_workers.learner.torch.forward import SharedPrefix, compute_scores

COPY_LENGTH = 96
LEARNING_RATE = 1e-3

Sequences = tuple[list[NDArray[np.int32]], list[NDArray[np.bool_]]]
"""Token ids and loss masks, one array each per sequence."""


def build_model(tokenizer: Any, *, seed: int) -> PreTrainedModel:
    """A Qwen3 of about half a million parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config).eval()
    return model


def generate_copy_sequences(count: int, *, vocabulary: range, seed: int) -> Sequences:
    """Random tokens that repeat with a random period; every token after the first of the second period is predictable."""
    draw = np.random.default_rng(seed)
    ids, masks = [], []
    for period in draw.integers(12, COPY_LENGTH * 3 // 4, count):
        once = draw.integers(vocabulary.start, vocabulary.stop, period).astype(np.int32)
        ids.append(np.resize(once, COPY_LENGTH))
        masks.append(np.arange(COPY_LENGTH) > period)
    return ids, masks


def fit(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    decayed_to: float = 0.1,
    after_step: Callable[[int, float], bool] = lambda step, loss: False,
) -> int:
    """Maximise the likelihood of the masked tokens with AdamW and linear decay; returns the steps done.

    ``after_step`` gets the number of steps done and the mean negative log-likelihood, and returns True to stop.
    """
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order: list[int] = []
    for step in range(steps):
        if len(order) < batch_size:
            order = draw.sample(range(len(sequences[0])), len(sequences[0]))
        chosen, order = order[:batch_size], order[batch_size:]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10) * (1.0 - (1.0 - decayed_to) * step / steps)
        loss = _fit_once(model, optimizer, [sequences[0][i] for i in chosen], [sequences[1][i] for i in chosen])
        if after_step(step + 1, loss):
            return step + 1
    return steps


def _fit_once(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.bool_]],
) -> float:
    length = find_shared_prefix(ids, masks)
    prefix = SharedPrefix(model, torch.from_numpy(ids[0][:length].astype(np.int64))) if length else None
    count = sum(int(mask.sum()) for mask in masks)
    total = 0.0
    for batch in split_micro_batches(ids, masks, prefix=length, size=16):
        loss = -compute_scores(model, batch, prefix=prefix).logprobs.sum() / count
        torch.autograd.backward(loss)
        total += loss.item()
    if prefix is not None:
        prefix.close()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
