"""Attention of packed rows, one sequence after the other: what no kernel for variable lengths does where there is none.

Transformers gives packed rows of SDPA a mask of all pairs of tokens, so that a row of many short sequences costs as much as one
long one. Here each sequence has a causal call of its own. The linear layers still see the row whole.
"""

from itertools import pairwise

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fleetbus_workers.learner.torch.forward import can_pack

NAME = "fleetbus_by_sequence"
"""Transformers makes no mask for an implementation that it does not know."""


def attend_by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """SDPA of query [R, heads, S, D] within each sequence: one begins wherever ``position_ids`` [R, S] is 0, alike in all rows.
    Without positions a row is taken for one sequence."""
    starts = [0] if position_ids is None else torch.nonzero(position_ids[0] == 0)[:, 0].tolist()
    lengths = [stop - start for start, stop in pairwise([*starts, query.shape[2]])]
    found = []
    for parts in zip(*(torch.split(each, lengths, dim=2) for each in (query, key, value)), strict=True):
        mask = _build_mask(parts[0].shape[2], sliding_window, query.device)
        found.append(sdpa_attention_forward(module, *parts, mask, **options)[0])
    return torch.cat(found, dim=1), None


def _build_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """None where plain causal attention is meant."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < window))[None, None]


def split_packed_rows(model: PreTrainedModel) -> None:
    """Have a model that computes by SDPA attend by sequence, unless its packed sequences would then see each other. Every
    process of a sharded model has to ask."""
    if model.config._attn_implementation != "sdpa":
        return
    model.set_attn_implementation(NAME)
    if not can_pack(model):
        model.set_attn_implementation("sdpa")


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_by_sequence)
