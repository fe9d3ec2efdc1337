"""The decoder of the Llama, Qwen2 and Qwen3 families, arranged for many short turns on few cores.

It computes what transformers' models compute (a test holds it to that) in a third of the time: projections are joined and
stored input-major, keys are stored time-last, heads rotate as complex numbers, rows that share a prefix attend to it in one
product. This file arranges weights and indices; the arithmetic is in `fleetbus_workers.inference.torch.kernel`. Full
attention only; any other model runs through `fleetbus_workers.inference.torch.generic`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_workers.inference.torch.batch import Batch
from fleetbus_workers.inference.torch.captured_steps import CapturedSteps, copy_weights
from fleetbus_workers.inference.torch.kernel import Layer, Tokens, Weights, compute_logits
from fleetbus_workers.inference.torch.packed import pack
from fleetbus_workers.inference.torch.slots import SlotCache
from fleetbus_workers.weights.file import unique_tensors

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone."""

MIN_SHARED_TOKENS = 48
"""Shared tokens from which on a product of their own pays for itself."""


class FusedRunner:
    """`Runner` for one of `FAMILIES`."""

    def __init__(self, model: Any, *, slots: int, max_model_len: int) -> None:
        config = model.config
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        roots = [(width * config.rms_norm_eps) ** 0.5 for width in (config.hidden_size, self.size)]
        self._epsilons = [torch.tensor(root, device=model.device) for root in roots]
        self._group_numbers = np.arange(self.groups)
        self.depth: int = config.num_hidden_layers
        self.vocabulary: int = config.vocab_size
        self.device = model.device
        self._dtype: torch.dtype = model.dtype
        tensors = unique_tensors(model.state_dict())
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.rotation = _compute_rotation(model, max_model_len)
        captures = self.device.type == "cuda"
        self.cache = SlotCache(slots, max_model_len, spare=int(captures))
        shape = (self.depth, slots, self.groups, self.size, 0)
        self._keys = self.cache.add(shape, slot=1, time=4, dtype=torch.float32, device=self.device)
        shape = (self.depth, slots, self.groups, 0, self.size)
        self._values = self.cache.add(shape, slot=1, time=3, dtype=torch.float32, device=self.device)
        self.weights: Weights = self.prepare(tensors)
        self._captured: CapturedSteps | None = None
        if captures:
            self._captured = CapturedSteps(self.weights, self.cache, self._keys, self._values, self.groups)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        read = {name: tensor.to(self.device, torch.float32) for name, tensor in tensors.items()}
        embedding = read["model.embed_tokens.weight"].clone()
        head = self._arrange(_fold_norm(read["model.norm.weight"], read.get("lm_head.weight", embedding)))
        layers = [self._build_layer(read, f"model.layers.{index}.") for index in range(self.depth)]
        return Weights(embedding, layers, head, self.rotation, *self._epsilons)

    def adopt(self, prepared: Weights) -> None:
        if self._captured is None:
            self.weights = prepared
        else:
            copy_weights(self.weights, prepared)

    def step(self, batch: Batch) -> torch.Tensor:
        if self._captured is not None and not batch.prefills:
            return self._captured.step(batch)
        return compute_logits(self.weights, self._build_tokens(batch), self._keys.tensor, self._values.tensor)

    def _build_tokens(self, batch: Batch) -> Tokens:
        counts = [len(prefill.ids) for prefill in batch.prefills]
        prefill_rows, starts = [prefill.row for prefill in batch.prefills], [prefill.start for prefill in batch.prefills]
        ids, positions, rows = batch.tokens, batch.positions, np.arange(len(batch.tokens))
        if batch.prefills:
            ids = np.concatenate((ids, *(prefill.ids for prefill in batch.prefills)))
            rows = np.concatenate((rows, np.repeat(prefill_rows, counts)))
            spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            positions = np.concatenate((positions, *spans))
        return Tokens(
            ids=self._to_device(ids),
            lanes=self._to_device(rows[:, None] * self.groups + self._group_numbers),
            positions=self._to_device(positions),
            row_count=len(batch.tokens),
            longest=batch.longest,
            shared=batch.shared if batch.shared >= MIN_SHARED_TOKENS and len(batch.tokens) > 1 else 0,
            prefill_rows=prefill_rows,
            prefill_starts=starts,
            prefill_counts=counts,
        )

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _build_layer(self, read: Mapping[str, torch.Tensor], prefix: str) -> Layer:
        def read_weight(name: str) -> torch.Tensor:
            return read[f"{prefix}{name}.weight"]

        out_bias = read.get(f"{prefix}self_attn.o_proj.bias")
        joined_bias = self._join_projections(read, prefix, "bias") if f"{prefix}self_attn.q_proj.bias" in read else None
        return Layer(
            qkv=self._arrange(_fold_norm(read_weight("input_layernorm"), self._join_projections(read, prefix, "weight"))),
            qkv_bias=joined_bias,
            head_norm=self._build_head_norm(read, prefix),
            out=self._arrange(read_weight("self_attn.o_proj").t()),
            out_bias=None if out_bias is None else out_bias.clone(),
            gate=self._arrange(_fold_norm(read_weight("post_attention_layernorm"), read_weight("mlp.gate_proj"))),
            up=self._arrange(_fold_norm(read_weight("post_attention_layernorm"), read_weight("mlp.up_proj"))),
            down=self._arrange(read_weight("mlp.down_proj").t()),
        )

    def _arrange(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix float32 [inputs, outputs] in the type and the order that it is multiplied in."""
        return pack(matrix.to(self._dtype))

    def _join_projections(self, read: Mapping[str, torch.Tensor], prefix: str, kind: str) -> torch.Tensor:
        """The projections to q, k and v one after another, outputs first; q carries the scale of the scores, unless it is
        normed afterwards."""
        query, key, value = (read[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
        scale = 1.0 if f"{prefix}self_attn.q_norm.weight" in read else self.size**-0.5
        return torch.cat((self._interleave_halves(query) * scale, self._interleave_halves(key), value))

    def _build_head_norm(self, read: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor | None:
        """Norm weights of every query and key head, [heads + groups, size]; those of q carry the scale of the scores."""
        if f"{prefix}self_attn.q_norm.weight" not in read:
            return None
        query, key = (self._interleave_halves(read[f"{prefix}self_attn.{name}_norm.weight"]) for name in "qk")
        return torch.cat((query.expand(self.heads, -1), key.expand(self.groups, -1) * self.size**0.5))

    def _interleave_halves(self, weight: torch.Tensor) -> torch.Tensor:
        """Reorder each head's outputs from two halves to pairs, so that a pair is one complex number."""
        halves = weight.view(-1, 2, self.size // 2, *weight.shape[1:])
        return halves.transpose(1, 2).flatten(0, 2)


def _fold_norm(norm: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """A projection [inputs, outputs] of what the kernel's norm returns, from one of what a norm returns."""
    root: float = norm.shape[0] ** 0.5
    return (projection * norm * root).t()


def build_fused_runner(model: Any, *, slots: int, max_model_len: int) -> FusedRunner | None:
    """The compact form of a transformers model, or None if it is of another family or computes something else."""
    return FusedRunner(model, slots=slots, max_model_len=max_model_len) if _is_supported(model) else None


def _is_supported(model: Any) -> bool:
    config = model.config
    if config.model_type not in FAMILIES or model.dtype not in (torch.float32, torch.bfloat16) or config.hidden_act != "silu":
        return False
    sliding = getattr(config, "layer_types", None) or ["full_attention" if not getattr(config, "sliding_window", None) else ""]
    rotation = config.rope_parameters.get("rope_type", "default")
    whole = config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0 and rotation in FIXED_ROTATIONS
    return whole and set(sliding) == {"full_attention"} and set(model.state_dict()) <= _list_tensor_names(config)


def _list_tensor_names(config: Any) -> set[str]:
    """Every tensor that `FusedRunner` computes with; a model that has others computes something else."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    inner = [f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")]
    inner += [f"self_attn.{name}_norm.weight" for name in "qk"]
    inner += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    inner += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    return names | {f"model.layers.{index}.{name}" for index in range(config.num_hidden_layers) for name in inner}


def _compute_rotation(model: Any, max_model_len: int) -> torch.Tensor:
    """The model's own rotary embedding as complex numbers, [max_model_len, head size / 2]."""
    positions = torch.arange(max_model_len, device=model.device)[None]
    cosine, sine = model.model.rotary_emb(torch.zeros(1, device=model.device), positions)
    half = cosine.shape[-1] // 2
    return torch.complex(cosine[0, :, :half], sine[0, :, :half])
