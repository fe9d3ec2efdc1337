"""Log-probabilities of sampled tokens under a transformers causal language model, with gradient, at the least cost.

The prefix that all sequences share (the system prompt) is run once; its keys and values enter every micro-batch through the
public cache interface, and their gradients are collected and sent through the prefix at the end. Logits are computed only
where a token was sampled. The gradient is that of the plain forward pass over every whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fleetbus_workers.learner.torch.batches import MicroBatch

Inputs = Callable[[PreTrainedModel, torch.Tensor], dict[str, torch.Tensor]]
"""What a model is called with for ids int64 [R, S]."""


class Scores(NamedTuple):
    """Of N sampled tokens: ``logprobs`` [N] with gradient, ``entropies`` [N] without; natural logarithms."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


def build_text_inputs(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model is called with for ids [R, S] of text."""
    return {"input_ids": ids}


class SharedPrefix:
    """Keys and values of a prefix, run once; `close` sends the gradients that the micro-batches left in them through it."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, inputs: Inputs = build_text_inputs) -> None:
        cache = model.base_model(**inputs(model, ids[None]), use_cache=True).past_key_values
        self._computed = [tensor for layer in cache for tensor in layer[:2]]
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._computed]

    def cache(self, rows: int) -> DynamicCache:
        """A fresh cache with the prefix in each of ``rows`` rows."""
        expand_image_tokens = [leaf.expand(rows, -1, -1, -1) for leaf in self._leaves]
        return DynamicCache(list(zip(expand_image_tokens[::2], expand_image_tokens[1::2], strict=True)))

    def close(self) -> None:
        pairs = [(value, leaf.grad) for value, leaf in zip(self._computed, self._leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])


def can_share_prefix(model: PreTrainedModel) -> bool:
    """True if every layer keeps all keys and values, so that a prefix is nothing but its cache."""
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        cache = getattr(model.base_model(input_ids=ids, use_cache=True), "past_key_values", None)
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def has_plain_head(model: PreTrainedModel) -> bool:
    """True if the logits are the output embedding of the last hidden state and nothing more (no soft cap, no scale)."""
    # Not token 0: that is often padding, whose embedding is zero.
    ids = torch.tensor([[1, 2]], device=model.device)
    head = model.get_output_embeddings()
    # Enlarged, because a soft cap changes nothing that can be seen in small logits.
    hook = head.register_forward_hook(lambda module, given, logits: 1e4 * logits)
    try:
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return torch.equal(head(hidden), model(input_ids=ids, use_cache=False).logits)
    finally:
        hook.remove()


def can_pack(model: PreTrainedModel) -> bool:
    """True if sequences that are packed into one row do not see each other: tried on two short ones."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 13, device=model.device)[None] % vocabulary
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(model.device)
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 5:]
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits[0]
    return torch.allclose(together, alone, atol=1e-4, rtol=1e-3)


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """True if the model computes logits at chosen places only when it is asked to."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def compute_scores(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    prefix: SharedPrefix | None,
    temperature: torch.Tensor | float = 1.0,
    plain_head: bool = True,
    precision: torch.dtype = torch.float32,
    inputs: Inputs = build_text_inputs,
) -> Scores:
    """Scores of the batch's sampled tokens; ``temperature`` divides the logits, one for all or one per token [N].

    ``plain_head`` False runs the model as a whole, as a sharded model or one with a soft cap needs. ``precision`` bfloat16
    computes in that type; logits are turned to float32 before their softmax. ``inputs`` puts images in the place of tokens.
    """
    options: dict[str, Any] = {"use_cache": False}
    if prefix is not None:
        options = {"use_cache": True, "past_key_values": prefix.cache(len(batch.ids))}
    if batch.positions is not None:
        options["position_ids"] = batch.positions
    with torch.autocast(batch.ids.device.type, precision, enabled=precision != torch.float32):
        logits = _compute_logits(model, batch, plain_head, inputs(model, batch.ids) | options).float()
    if isinstance(temperature, torch.Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    everywhere = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropies = -(everywhere.exp() * everywhere).sum(-1)
    return Scores(everywhere.gather(-1, batch.targets[:, None])[:, 0], entropies)


def _compute_logits(model: PreTrainedModel, batch: MicroBatch, plain_head: bool, options: dict[str, Any]) -> torch.Tensor:
    """Logits [N, vocabulary] at the places whose next token was sampled."""
    logits: torch.Tensor
    if plain_head:
        hidden = model.base_model(**options).last_hidden_state
        logits = model.get_output_embeddings()(hidden[batch.rows, batch.columns])
    elif supports_logits_to_keep(model) and len(batch.columns):
        kept, places = torch.unique(batch.columns, return_inverse=True)
        logits = model(logits_to_keep=kept, **options).logits[batch.rows, places]
    else:
        logits = model(**options).logits[batch.rows, batch.columns]
    return logits
