"""One step of the compact decoder as functions of tensors, kept to what TorchScript understands: see `compile_function`.

Hence no postponed annotations here, no keyword-only arguments, and no constants of the module. Nothing here knows of
requests or versions; `fleetbus_workers.inference.torch.fused_decoder` arranges weights and indices for it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fleetbus_workers.inference.torch.torchscript import compile_function


class Layer(NamedTuple):
    """One layer's weights, inputs first: ``qkv`` is [hidden, heads of q, k and v], and so on. None: the model has none.
    Matrices are in float32 or bfloat16, all else is in float32.

    What the norm before a projection multiplies with is multiplied into the projection.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Weights(NamedTuple):
    """One version, ready to compute with.

    ``embedding`` [vocabulary, hidden]; ``head`` [hidden, vocabulary]; ``rotation`` complex, [positions, size / 2];
    ``epsilon`` and ``head_epsilon`` are roots of width times epsilon, for norms over hidden and over one head.
    """

    embedding: torch.Tensor
    layers: list[Layer]
    head: torch.Tensor
    rotation: torch.Tensor
    epsilon: torch.Tensor
    head_epsilon: torch.Tensor


class Tokens(NamedTuple):
    """All tokens of a step, one per row first, then the extras. ``ids``, ``rows``, ``positions`` int64 [tokens].

    The extras of row ``prefill_rows[i]`` are ``prefill_counts[i]`` tokens from position ``prefill_starts[i]`` on. ``longest``
    is the
    largest position plus one; the first ``shared`` positions hold the same in all rows, if that is worth using, or else 0.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    row_count: int
    longest: int
    shared: int
    prefill_rows: list[int]
    prefill_starts: list[int]
    prefill_counts: list[int]


def step(weights: Weights, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] after each row's token. ``keys`` [depth, slots, groups, size, capacity] and ``values``
    [depth, slots, groups, capacity, size] are written on the way. In the last layer extras leave only those behind."""
    rotation = weights.rotation[tokens.positions].unsqueeze(1)
    mask = _build_row_mask(tokens, keys.shape[2])
    hidden = F.embedding(tokens.ids, weights.embedding)
    for index, layer in enumerate(weights.layers):
        wanted = tokens.row_count if index == len(weights.layers) - 1 else hidden.shape[0]
        queries = _write_keys_values(
            layer, hidden, tokens, rotation, keys[index], values[index], weights.epsilon, weights.head_epsilon
        )
        seen = _attend_rows(queries[: tokens.row_count], keys[index], values[index], mask, tokens.shared, tokens.longest)
        if wanted > tokens.row_count:
            seen = torch.cat((seen, _attend_prefills(queries[tokens.row_count :], tokens, keys[index], values[index])))
        hidden = _add_product(hidden[:wanted], seen.reshape(wanted, -1), layer.out)
        out_bias = layer.out_bias
        if out_bias is not None:
            hidden.add_(out_bias)
        normed = _normalize(hidden, weights.epsilon)
        if layer.gate.dtype != normed.dtype:
            normed = normed.to(layer.gate.dtype)
        hidden = _add_product(hidden, F.silu(normed @ layer.gate).mul_(normed @ layer.up), layer.down)
    return _multiply(_normalize(hidden, weights.epsilon), weights.head)


def _multiply(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the type of the weight, as float32."""
    if left.dtype != weight.dtype:
        left = left.to(weight.dtype)
    return (left @ weight).float()


def _add_product(hidden: torch.Tensor, left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` float32 and the product, which is computed in the type of the weight."""
    if hidden.dtype == weight.dtype:
        return torch.addmm(hidden, left, weight)
    return hidden + _multiply(left, weight)


def _normalize(hidden: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Divide by the root of (sum of squares + width times epsilon); the factor root of width is in the weights after it."""
    return hidden / torch.hypot(torch.linalg.vector_norm(hidden, 2.0, [-1], True), epsilon)


def _build_row_mask(tokens: Tokens, groups: int) -> torch.Tensor:
    """Additive, [rows * groups, 1, longest - shared]: hides positions behind each row's own."""
    last = tokens.positions[: tokens.row_count].repeat_interleave(groups)
    times = torch.arange(tokens.shared, tokens.longest, device=last.device)
    return torch.where(times > last[:, None, None], -1e30, 0.0)


def _write_keys_values(
    layer: Layer,
    hidden: torch.Tensor,
    tokens: Tokens,
    rotation: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    epsilon: torch.Tensor,
    head_epsilon: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values of all tokens and return their queries, [tokens, groups, queries, size]."""
    count, groups, size = hidden.shape[0], values.shape[1], values.shape[3]
    joined = _multiply(_normalize(hidden, epsilon), layer.qkv)
    qkv_bias = layer.qkv_bias
    if qkv_bias is not None:
        joined.add_(qkv_bias)
    parts = joined.view(count, -1, size)
    heads = parts.shape[1] - groups
    unrotated = parts[:, :heads]
    head_norm = layer.head_norm
    if head_norm is not None:
        unrotated = _normalize(unrotated, head_epsilon).mul_(head_norm)
    pairs = torch.view_as_complex(unrotated.view(count, heads, size // 2, 2))
    rotated = torch.view_as_real(pairs * rotation).view(count, heads, size)
    keys.permute(0, 3, 1, 2).index_put_((tokens.rows, tokens.positions), rotated[:, heads - groups :])
    values.transpose(1, 2).index_put_((tokens.rows, tokens.positions), parts[:, heads:])
    return rotated[:, : heads - groups].view(count, groups, -1, size)


def _attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, shared: int, longest: int
) -> torch.Tensor:
    """One query per row, [rows, groups, queries, size], over its history; the shared part is one product for all rows."""
    rows, groups, queries, size = query.shape
    own_keys = keys[:rows, :, :, shared:longest].flatten(0, 1)
    own_values = values[:rows, :, shared:longest].flatten(0, 1)
    own = torch.baddbmm(mask, query.reshape(rows * groups, queries, size), own_keys)
    if shared == 0:
        return torch.bmm(own.softmax(-1), own_values).view(rows, groups, queries, size)
    by_group = query.transpose(0, 1).reshape(groups, rows * queries, size)
    common = torch.bmm(by_group, keys[0, :, :, :shared]).view(groups, rows, queries, shared)
    weights = torch.cat((common, own.view(rows, groups, queries, -1).transpose(0, 1)), -1).softmax(-1)
    of_own = weights[..., shared:].transpose(0, 1).reshape(rows * groups, queries, -1)
    seen_of_own = torch.bmm(of_own, own_values).view(rows, groups, queries, size)
    seen_of_common = torch.bmm(weights[..., :shared].flatten(1, 2), values[0, :, :shared])
    return seen_of_own + seen_of_common.view(groups, rows, queries, size).transpose(0, 1)


def _attend_prefills(query: torch.Tensor, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of each joining row's extra tokens, in blocks that bound the memory of their scores."""
    seen: list[torch.Tensor] = []
    at = 0
    for row, start, count in zip(tokens.prefill_rows, tokens.prefill_starts, tokens.prefill_counts):  # noqa: B905
        for first in range(0, count, 256):
            stop = min(first + 256, count)
            seen.append(_attend_block(query[at + first : at + stop], keys[row], values[row], start + first))
        at += count
    return torch.cat(seen)


def _attend_block(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Tokens at positions ``start``, ``start`` + 1, ... of one row, each seeing everything up to itself."""
    count, groups, queries, size = query.shape
    stop = start + count
    later = torch.full((count, count), -1e30, device=query.device).triu_(1)
    scores = torch.bmm(query.permute(1, 2, 0, 3).reshape(groups, queries * count, size), keys[:, :, :stop])
    scores = scores.view(groups, queries, count, stop)
    scores[..., start:].add_(later)
    weights = scores.softmax(-1).view(groups, queries * count, stop)
    return torch.bmm(weights, values[:, :stop]).view(groups, queries, count, size).permute(2, 0, 1, 3)


run_compiled_step = compile_function(step)
"""`step` as one call that does not hold the interpreter lock."""
