"""One step of the compact decoder as functions of tensors.

A step of a small model is a hundred short calls, each of which costs a microsecond or two before it computes: views of the
cache are taken of slots and groups joined, and what exists is written into. Nothing here knows of requests or versions;
`fleetbus_workers.inference.torch.fused_decoder` arranges weights and indices for it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fleetbus_workers.inference.torch.packed import multiply


class Layer(NamedTuple):
    """One layer's weights, inputs first: ``qkv`` is [hidden, heads of q, k and v], and so on. None: the model has none.
    Matrices are in float32 or, as `pack` returns them, in bfloat16; all else is in float32.

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
    """All tokens of a step, one per row first, then the extras. ``ids``, ``positions`` int64 [tokens].

    A lane is one group of keys and values of one row: ``lanes`` int64 [tokens, groups] is row * groups + group. The extras of
    row ``prefill_rows[i]`` are ``prefill_counts[i]`` tokens from position ``prefill_starts[i]`` on. ``longest`` is the largest
    position plus one; the first ``shared`` positions hold the same in all rows, if that is worth using, or else 0.
    """

    ids: torch.Tensor
    lanes: torch.Tensor
    positions: torch.Tensor
    row_count: int
    longest: int
    shared: int
    prefill_rows: list[int]
    prefill_starts: list[int]
    prefill_counts: list[int]


def compute_logits(weights: Weights, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] after each row's token. ``keys`` [depth, slots, groups, size, capacity] and ``values``
    [depth, slots, groups, capacity, size] are written on the way. In the last layer extras leave only those behind."""
    rows, longest = tokens.row_count, tokens.longest
    rotation = weights.rotation[tokens.positions].unsqueeze(1)
    mask = _build_lane_mask(tokens)
    places = tokens.lanes, tokens.positions[:, None]
    hidden = F.embedding(tokens.ids, weights.embedding)
    layers = zip(weights.layers, keys.flatten(1, 2).unbind(), values.flatten(1, 2).unbind(), strict=True)
    for index, (layer, lane_keys, lane_values) in enumerate(layers):
        queries = _write_keys_values(weights, layer, hidden, rotation, places, lane_keys, lane_values)
        seen = _attend_rows(queries[:rows], lane_keys, lane_values, mask, tokens.shared, longest)
        if index == len(weights.layers) - 1:
            hidden = hidden[:rows]
        elif tokens.prefill_rows:
            seen = torch.cat((seen, _attend_prefills(queries[rows:], tokens, keys[index], values[index])))
        hidden = _add_product(hidden, seen.flatten(1), layer.out)
        if layer.out_bias is not None:
            hidden.add_(layer.out_bias)
        normed = _normalize(hidden, weights.epsilon).to(layer.gate.dtype)
        gated = F.silu(multiply(normed, layer.gate), inplace=True).mul_(multiply(normed, layer.up))
        hidden = _add_product(hidden, gated, layer.down)
    return _multiply(_normalize(hidden, weights.epsilon), weights.head)


def _multiply(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the type of the weight, as float32."""
    return multiply(left, weight).float()


def _add_product(hidden: torch.Tensor, left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` float32 and the product, which is computed in the type of the weight."""
    if hidden.dtype == weight.dtype:
        return torch.addmm(hidden, left, weight)
    return hidden + _multiply(left, weight)


def _normalize(hidden: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Divide by the root of (sum of squares + width times epsilon); the factor root of width is in the weights after it."""
    norms: torch.Tensor = torch.linalg.vector_norm(hidden, 2.0, -1, True).hypot_(epsilon)
    return hidden / norms


def _build_lane_mask(tokens: Tokens) -> torch.Tensor:
    """Additive, [rows * groups, 1, longest - shared]: hides positions behind each row's own."""
    last = tokens.positions[: tokens.row_count, None, None]
    if (groups := tokens.lanes.shape[1]) > 1:
        last = last.repeat_interleave(groups, 0)
    times = torch.arange(tokens.shared, tokens.longest, device=last.device)
    return torch.where(times > last, -1e30, 0.0)


def _write_keys_values(
    weights: Weights,
    layer: Layer,
    hidden: torch.Tensor,
    rotation: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Write keys [lanes, size, capacity] and values [lanes, capacity, size] of all tokens to ``places``, which are lanes and
    positions, and return their queries, [tokens, groups, queries, size]."""
    count, groups, size = hidden.shape[0], places[0].shape[1], values.shape[2]
    joined = _multiply(_normalize(hidden, weights.epsilon), layer.qkv)
    if layer.qkv_bias is not None:
        joined.add_(layer.qkv_bias)
    parts = joined.view(count, -1, size)
    heads = parts.shape[1] - groups
    unrotated = parts[:, :heads]
    if layer.head_norm is not None:
        unrotated = _normalize(unrotated, weights.head_epsilon).mul_(layer.head_norm)
    pairs = torch.view_as_complex(unrotated.view(count, heads, size // 2, 2))
    rotated = torch.view_as_real(pairs * rotation).view(count, heads, size)
    keys.transpose(1, 2).index_put_(places, rotated[:, heads - groups :])
    values.index_put_(places, parts[:, heads:])
    return rotated[:, : heads - groups].view(count, groups, -1, size)


def _attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, shared: int, longest: int
) -> torch.Tensor:
    """One query per row, [rows, groups, queries, size], over its history; the shared part is one product for all rows."""
    rows, groups, queries, size = query.shape
    lanes = rows * groups
    own_values = values[:lanes, shared:longest]
    own = torch.baddbmm(mask, query.reshape(lanes, queries, size), keys[:lanes, :, shared:longest])
    if shared == 0:
        return torch.bmm(own.softmax(-1), own_values).view(rows, groups, queries, size)
    by_group = query.transpose(0, 1).reshape(groups, rows * queries, size)
    common = torch.bmm(by_group, keys[:groups, :, :shared]).view(groups, rows, queries, shared)
    weights = torch.cat((common, own.view(rows, groups, queries, -1).transpose(0, 1)), -1).softmax(-1)
    of_own = weights[..., shared:].transpose(0, 1).reshape(lanes, queries, -1)
    seen_of_own = torch.bmm(of_own, own_values).view(rows, groups, queries, size)
    seen_of_common = torch.bmm(weights[..., :shared].flatten(1, 2), values[:groups, :shared])
    return seen_of_own.add_(seen_of_common.view(groups, rows, queries, size).transpose(0, 1))


def _attend_prefills(query: torch.Tensor, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of each joining row's extra tokens, in blocks that bound the memory of their scores."""
    seen: list[torch.Tensor] = []
    at = 0
    for row, start, count in zip(tokens.prefill_rows, tokens.prefill_starts, tokens.prefill_counts, strict=True):
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
