"""Log-probabilities of sampled tokens under a transformers causal language model, with gradient, at the least cost.

The prefix that all sequences share (the system prompt) is run once; its keys and values enter every micro-batch through the
public cache interface, and their gradients are collected and sent through the prefix at the end. Logits are computed only
where a token was sampled. The gradient is that of the plain forward pass over every whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from workers.learner.torch.batches import MicroBatch


class Scores(NamedTuple):
    """Of N sampled tokens: ``logprobs`` [N] with gradient, ``entropies`` [N] without; natural logarithms."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


class SharedPrefix:
    """Keys and values of a prefix, run once; `close` sends the gradients that the micro-batches left in them through it."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        cache = model.base_model(input_ids=ids[None], use_cache=True).past_key_values
        self._computed = [tensor for layer in cache for tensor in layer[:2]]
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._computed]

    def cache(self, rows: int) -> DynamicCache:
        """A fresh cache with the prefix in each of ``rows`` rows."""
        expanded = [leaf.expand(rows, -1, -1, -1) for leaf in self._leaves]
        return DynamicCache(list(zip(expanded[::2], expanded[1::2], strict=True)))

    def close(self) -> None:
        pairs = [(value, leaf.grad) for value, leaf in zip(self._computed, self._leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])


def can_share(model: PreTrainedModel) -> bool:
    """True if every layer keeps all keys and values, so that a prefix is nothing but its cache."""
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        cache = getattr(model.base_model(input_ids=ids, use_cache=True), "past_key_values", None)
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def head_is_plain(model: PreTrainedModel) -> bool:
    """True if the logits are the output embedding of the last hidden state and nothing more (no soft cap, no scale)."""
    # Not token 0: that is often padding, whose embedding is zero.
    ids = torch.tensor([[1, 2]], device=model.device)
    head = model.get_output_embeddings()
    # Enlarged, because a soft cap changes nothing that can be seen in small logits.
    enlarging = head.register_forward_hook(lambda module, given, logits: 1e4 * logits)
    try:
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return torch.equal(head(hidden), model(input_ids=ids, use_cache=False).logits)
    finally:
        enlarging.remove()


def score(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    prefix: SharedPrefix | None,
    temperature: torch.Tensor | float = 1.0,
    plain_head: bool = True,
) -> Scores:
    """Scores of the batch's sampled tokens; ``temperature`` divides the logits, one for all or one per token [N]."""
    options: dict[str, Any] = {"use_cache": False}
    if prefix is not None:
        options = {"use_cache": True, "past_key_values": prefix.cache(len(batch.ids))}
    if plain_head:
        hidden = model.base_model(input_ids=batch.ids, **options).last_hidden_state
        logits = model.get_output_embeddings()(hidden[batch.rows, batch.columns])
    else:
        logits = model(input_ids=batch.ids, **options).logits[batch.rows, batch.columns]
    logits = logits.float()
    if isinstance(temperature, torch.Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    everywhere = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropies = -(everywhere.exp() * everywhere).sum(-1)
    return Scores(everywhere.gather(-1, batch.targets[:, None])[:, 0], entropies)
