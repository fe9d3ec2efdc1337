"""Any causal language model of transformers, through its public forward call and a cache of slots in place of its own.

Extra tokens of joining rows run as one right-padded batch through the model without its head, then all rows decode as one
batch on views of the cache. Full and sliding attention; models with recurrent state or chunked attention are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from fleetbus.errors import UserError
from fleetbus_workers.inference.torch.batch import Batch, PrefillTokens
from fleetbus_workers.inference.torch.slots import Block, SlotCache
from fleetbus_workers.weights.file import unique_tensors
from fleetbus_workers.weights.forward_cache import build_cache_options

ATTENTIONS = frozenset({"full_attention", "sliding_attention"})


@dataclass
class CachePlacement:
    """The place at which the forward call in progress writes and reads: set before the call, read by every layer.

    ``rows`` int64 [b, 1] and ``positions`` int64 [b, q] say where keys and values go. ``contiguous``: rows are ``[0, b)``.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    longest: int
    contiguous: bool


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values in blocks of a `SlotCache`, [slots, heads, capacity, size] each."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self._blocks: tuple[Block, Block] | None = None
        self.placement: CachePlacement | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def block(states: torch.Tensor) -> Block:
            shape = (0, states.shape[1], 0, states.shape[3])
            return self._cache.add(shape, slot=0, time=2, dtype=states.dtype, device=states.device)

        self._blocks = (block(key_states), block(value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [b, heads, q, size] where `CachePlacement` says and return everything that the rows hold, [b, heads, longest,
        size]."""
        if self._blocks is None:
            self.lazy_initialization(key_states, value_states)
        assert self._blocks is not None and self.placement is not None
        return self._write_and_read(self._blocks[0], key_states), self._write_and_read(self._blocks[1], value_states)

    def _write_and_read(self, block: Block, states: torch.Tensor) -> torch.Tensor:
        assert self.placement is not None
        placement, stored = self.placement, block.tensor
        stored[placement.rows, :, placement.positions] = states.transpose(1, 2)
        rows = stored[: placement.rows.shape[0]] if placement.contiguous else stored[placement.rows[:, 0]]
        return rows[:, :, : placement.longest]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.placement.longest if self.placement else query_length), 0

    def get_max_length(self) -> int:
        return -1


class GenericRunner:
    """`Runner` for every other model."""

    def __init__(self, model: Any, *, slots: int, max_model_len: int) -> None:
        self.model = model
        self.device = model.device
        text = model.config.get_text_config()
        self.vocabulary: int = text.vocab_size
        kinds = getattr(text, "layer_types", None)
        self.window: int | None = getattr(text, "sliding_window", None)
        if unknown := set(kinds or ()) - ATTENTIONS:
            raise UserError(f"{model.config.model_type}: attention of kind {', '.join(sorted(unknown))} cannot be batched here")
        self._kinds: set[str] | None = set(kinds) if kinds else None
        self._parameters = unique_tensors(model.state_dict())
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        self.cache = SlotCache(slots, max_model_len)
        self._layers = [SlotLayer(self.cache) for _ in range(text.num_hidden_layers)]
        self._cache = Cache(layers=self._layers)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to(self._parameters[name], copy=True) for name, tensor in tensors.items()}

    def adopt(self, prepared: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in prepared.items():
            self._parameters[name].copy_(tensor)

    def step(self, batch: Batch) -> torch.Tensor:
        if batch.prefills:
            self._prefill(batch.prefills)
        rows = torch.arange(len(batch.tokens), device=self.device)[:, None]
        positions = torch.from_numpy(batch.positions).to(self.device)[:, None]
        tokens = torch.from_numpy(batch.tokens).to(self.device)[:, None]
        output = self._forward(self.model, tokens, CachePlacement(rows, positions, batch.longest, contiguous=True))
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _prefill(self, prefills: tuple[PrefillTokens, ...]) -> None:
        """Padding is written behind a row's real tokens: masked now, and overwritten before anything looks there."""
        width = max(len(prefill.ids) for prefill in prefills)
        tokens = torch.zeros((len(prefills), width), dtype=torch.int64)
        for index, prefill in enumerate(prefills):
            tokens[index, : len(prefill.ids)] = torch.from_numpy(prefill.ids)
        rows = torch.tensor([[prefill.row] for prefill in prefills], device=self.device)
        starts = torch.tensor([[prefill.start] for prefill in prefills], device=self.device)
        positions = starts + torch.arange(width, device=self.device)
        longest = max(prefill.start for prefill in prefills) + width
        self.cache.reserve(longest)
        self._forward(self.model.base_model, tokens.to(self.device), CachePlacement(rows, positions, longest, contiguous=False))

    def _forward(self, module: Any, tokens: torch.Tensor, placement: CachePlacement) -> Any:
        for layer in self._layers:
            layer.placement = placement
        return module(
            **self._build_inputs(tokens),
            attention_mask=self._build_mask(placement),
            position_ids=placement.positions,
            **build_cache_options(module, self._cache),
        )

    def _build_inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model for tokens int64 [b, q]."""
        return {"input_ids": tokens}

    def _build_mask(self, placement: CachePlacement) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [b, 1, q, longest]: one for all layers, or by kind where a model's layers differ in kind."""
        times = torch.arange(placement.longest, device=self.device)
        age = placement.positions[:, None, :, None] - times
        full = age < 0
        window = full if self.window is None else full | (age >= self.window)
        masks = {"full_attention": self._build_additive_mask(full), "sliding_attention": self._build_additive_mask(window)}
        if self._kinds is None:
            return masks["sliding_attention"]
        return masks if len(self._kinds) > 1 else masks[next(iter(self._kinds))]

    def _build_additive_mask(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, torch.finfo(dtype).min)
