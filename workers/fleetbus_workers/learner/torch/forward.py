"""Log-probabilities of sampled tokens under a transformers causal language model, with gradient, at the least cost.

The prefix that all sequences share (the system prompt) is run once; its keys and values enter every micro-batch through the
public cache interface, and their gradients are collected and sent through the prefix at the end. Logits are computed only
where a token was sampled. The gradient is that of the plain forward pass over every whole sequence.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fleetbus_workers.learner.torch.batches import MicroBatch
from fleetbus_workers.learner.torch.token_scores import Scores, score_logits, score_tokens
from fleetbus_workers.weights.forward_cache import build_cache_options, get_cache

ROUNDING_SHARE, EXACT_SHARE = 0.25, 0.01
"""Of the difference that a mistake makes, in bfloat16 and in float32 (a GPU's shortened products, too); less is rounding."""

Inputs = Callable[[PreTrainedModel, torch.Tensor], dict[str, torch.Tensor]]
"""What a model is called with for ids int64 [R, S]."""


def build_text_inputs(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments that a model is called with for ids [R, S] of text."""
    return {"input_ids": ids}


class SharedPrefix:
    """Keys and values of a prefix, run once; `close` sends the gradients that the micro-batches left in them through it."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, inputs: Inputs = build_text_inputs) -> None:
        cache = get_cache(model.base_model(**inputs(model, ids[None]), use_cache=True))
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


def is_rounding(found: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if logits are the ``expected`` ones but for what computing in ``dtype`` leaves: a small part of what makes them
    ``wrong``, and in float32 nearly nothing."""
    share = ROUNDING_SHARE if dtype != torch.float32 else EXACT_SHARE
    return bool((found - expected).abs().mean() < share * (wrong - expected).abs().mean())


def can_share_prefix(model: PreTrainedModel) -> bool:
    """True if every layer keeps all keys and values, so that a prefix is nothing but its cache."""
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        cache = get_cache(model.base_model(input_ids=ids, use_cache=True))
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


def has_plain_logits(model: PreTrainedModel) -> bool:
    """True if what the model returns are its head's logits and nothing more; every process of a sharded one has to ask."""
    ids = torch.tensor([[1, 2]], device=model.device)
    made: list[torch.Tensor] = []

    def enlarge(module: torch.nn.Module, given: object, logits: torch.Tensor) -> torch.Tensor:
        made.append(1e4 * logits)
        return made[-1]

    hook = model.get_output_embeddings().register_forward_hook(enlarge)
    try:
        with torch.no_grad():
            found = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return torch.equal(made[-1].float(), found.float())


def find_head(model: PreTrainedModel, processes: int) -> tuple[bool, bool]:
    """Find out if a model's head can be called alone, and if something else is made of its logits; every process of a sharded
    model, which has to be entered at its top, has to ask."""
    plain = processes == 1 and has_plain_head(model)
    return plain, not plain and not has_plain_logits(model)


def can_pack(model: PreTrainedModel) -> bool:
    """True if sequences that are packed into one row do not see each other: tried on two short ones.

    What is left has to be a small part of what it makes when the second one does see the first (`is_rounding`)."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 13, device=model.device)[None] % vocabulary

    def compute(first: int, *lengths: int) -> torch.Tensor:
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
        logits: torch.Tensor = model(input_ids=ids[:, first:], position_ids=positions, use_cache=False).logits
        return logits[0, -7:].float()

    with torch.no_grad():
        alone, together, seen = compute(5, 7), compute(0, 5, 7), compute(0, 12)
    device = model.device.type
    computed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    return is_rounding(together, alone, seen, computed)


def project_in_float32(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Logits float32 [N, vocabulary] of ``hidden`` [N, H], whatever both are in: a bfloat16 logit of 20 is off by up to .06."""
    with torch.autocast(hidden.device.type, enabled=False):
        bias = head.bias.float() if head.bias is not None else None
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)


@contextmanager
def replace_forward(module: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have ``module`` compute something else for the block."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


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
    whole_logits: bool = False,
    precision: torch.dtype = torch.float32,
    float32_head: bool = False,
    inputs: Inputs = build_text_inputs,
    entropy_gradient: bool = False,
) -> Scores:
    """Scores of the batch's sampled tokens; ``temperature`` divides the logits, one for all or one per token [N].

    ``plain_head`` False enters the model at its top, as a sharded one needs; ``whole_logits`` True if that makes something
    else of
    the head's logits, such as a soft cap. ``precision`` bfloat16 computes in that type; logits are turned to float32 before
    their softmax, or with ``float32_head`` computed in it. ``inputs`` puts images in the place of tokens.
    """
    options: dict[str, object] = {"use_cache": False}
    if prefix is not None:
        options = build_cache_options(model, prefix.cache(len(batch.ids)))
    if batch.positions is not None:
        options["position_ids"] = batch.positions
    if batch.visible is not None:
        options["attention_mask"] = batch.visible
    if batch.repeats is not None and isinstance(temperature, torch.Tensor):
        temperature = temperature.new_ones(len(batch.targets)).scatter(0, batch.repeats, temperature)
    head = model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    project = partial(project_in_float32, head) if float32_head and isinstance(head, torch.nn.Linear) else head.forward

    def score(hidden: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
        return score_tokens(
            embed,
            hidden,
            batch.targets,
            vocabulary=vocabulary,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )

    with torch.autocast(batch.ids.device.type, precision, enabled=precision != torch.float32):
        called = inputs(model, batch.ids) | options
        if plain_head:
            found = score(model.base_model(**called).last_hidden_state[batch.rows, batch.columns], project)
        elif whole_logits or not len(batch.columns):
            with replace_forward(head, project):
                logits = _compute_logits(model, batch, called)
            found = Scores(*score_logits(logits, batch.targets, temperature, entropy_gradient))
        else:
            found = _score_inside(model, head, batch, called, partial(score, embed=project))
    return found if batch.repeats is None else Scores(found.logprobs[batch.repeats], found.entropies[batch.repeats])


def _score_inside(
    model: PreTrainedModel,
    head: torch.nn.Module,
    batch: MicroBatch,
    called: dict[str, object],
    score: Callable[[torch.Tensor], Scores],
) -> Scores:
    """Scores made where the model makes its logits: a sharded head is whole only there. What the model returns as logits [1,
    N, 2] are log-probabilities and entropies."""
    places = batch.columns
    if supports_logits_to_keep(model):
        kept, places = torch.unique(batch.columns, return_inverse=True)
        called = called | {"logits_to_keep": kept}

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack(score(hidden[batch.rows, places]), dim=-1)[None]

    with replace_forward(head, forward):
        found = model(**called).logits[0]
    return Scores(found[:, 0], found[:, 1])


def _compute_logits(model: PreTrainedModel, batch: MicroBatch, called: dict[str, object]) -> torch.Tensor:
    """Logits [N, vocabulary] at the places whose next token was sampled."""
    logits: torch.Tensor
    if supports_logits_to_keep(model) and len(batch.columns):
        kept, places = torch.unique(batch.columns, return_inverse=True)
        logits = model(logits_to_keep=kept, **called).logits[batch.rows, places]
    else:
        logits = model(**called).logits[batch.rows, batch.columns]
    return logits
