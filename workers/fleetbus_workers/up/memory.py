"""Computes what a model needs of each GPU, from its shape and the settings, before anything starts. Pure.

The learner's terms are those of ``docs/gpu.md``: shards of weights, gradients and optimizer, what FSDP gathers of them for one
layer at a time, activations, and a chunk of logits. Beside them `benchmarks/memory_plan.py` measures what processes hold.
"""

from collections.abc import Mapping

import msgspec

from fleetbus.config.engine_arguments import parse_engine_arguments
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError

MASTER_BYTES = 4
"""Weights are trained in float32, their gradients summed in it; AdamW keeps two such numbers for each."""

LOGITS_BYTES = 4 * (64 << 20)
"""A chunk of float32 logits, its softmax and the gradients of both (`fleetbus_workers.learner.torch.token_scores`)."""

ENGINE_SHARE = 0.9
"""Of a GPU's memory, what vLLM takes for weights, activations and cache together."""

FRAGMENT_SHARE = 0.05
"""Of a GPU's memory, what lies between tensors and cannot be given out: assumed. A plan that leaves less is out of memory."""

TORCH_COPIES = 4
"""Of the weights in engine torch, at most."""

TORCH_GROWTH = 1.5
"""Times the keys and values of engine torch, while those grow by copying: the larger ones and half of what they replace."""

TORCH_REMEMBERED_BYTES = 5 << 28
"""Of keys and values that engine torch keeps of histories and prompts beside those of its sequences."""

ENGINE_OVERHEAD = 3 << 30
RUNTIME_BYTES = 2 << 30
"""Assumed, not measured: vLLM's activations and CUDA graphs; of any process the CUDA context, NCCL's buffers, fragments."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder as its ``config.json`` gives them. ``intermediate`` is the width of the feed-forward part that one
    token runs through: with experts, of those that it is sent to, ``routed`` of them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 0
    routed: int = 0
    normed_heads: bool = True

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, with the head where it has weights of its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        width = self.intermediate * (self.experts // self.routed if self.routed else 1)
        return attention + 3 * self.hidden * width + self.hidden * self.experts + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.embedding + self.layers * self.layer + self.hidden

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor: a version is gathered one at a time."""
        experts = 2 * self.hidden * self.intermediate * self.experts // self.routed if self.routed else 0
        return max(self.vocabulary * self.hidden, experts)

    def count_cached(self) -> int:
        """Keys and values of one token, in numbers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def measure_activations(self, *, lower: bool) -> int:
        """Bytes that one layer keeps of one token for the backward pass; ``lower``: computed in bfloat16.

        Counted from the tensors that autograd saved of Qwen3, Llama and Qwen3-MoE with transformers 5 and SDPA."""
        attention = (self.heads + self.kv_heads) * self.head_dim
        by_hidden, by_width, by_head = (30, 9.5, 11) if lower else (24, 16, 16)
        if not self.normed_heads:
            by_head //= 2
        routed = 8 * self.hidden * self.routed if self.routed else 0
        return int(by_hidden * self.hidden + by_width * self.intermediate + by_head * attention + routed)


def read_shape(config: Mapping[str, object], name: str = "config.json") -> ModelShape:
    """The shape of a Llama-like decoder, dense or with experts. Raises `UserError` if a size is missing or no number."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, Mapping) else config

    def find(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if isinstance(value := config.get(key), int) and value > 0:
                return value
        if default is None:
            raise UserError(f"{name} has no {keys[0]}, which this estimate needs")
        return default

    hidden, heads = find("hidden_size", "n_embd"), find("num_attention_heads", "n_head")
    experts = find("num_experts", "num_local_experts", "n_routed_experts", default=0)
    routed = find("num_experts_per_tok", default=0) if experts else 0
    width = find("intermediate_size", "n_inner", default=4 * hidden)
    return ModelShape(
        layers=find("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=routed * find("moe_intermediate_size", default=width) if routed else width,
        heads=heads,
        kv_heads=find("num_key_value_heads", default=heads),
        head_dim=find("head_dim", default=hidden // heads),
        vocabulary=find("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        routed=routed,
        normed_heads="qwen3" in str(config.get("model_type", "")),
    )


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one GPU of a role by what they are for; ``note`` says to a person what they suffice for. ``moments`` are the
    optimizer's, on the GPU or, offloaded, in the CPU's memory."""

    name: str
    parts: dict[str, int]
    note: str = ""
    moments: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan_learner(shape: ModelShape, configuration: Configuration, processes: int, *, on_gpu: bool = True) -> Parts:
    """One of ``processes`` that share the model, at its peak: the backward pass of a micro-batch."""
    trainer, lower = configuration.trainer, configuration.trainer.precision == "bfloat16"
    own = shape.parameters / min(trainer.shard_processes or processes, processes)
    trained = own if not trainer.lora_rank else 0
    adapters = _count_adapters(shape, trainer.lora_rank)
    computed = 2 if lower else MASTER_BYTES
    tokens = count_tokens(configuration)
    kept = shape.measure_activations(lower=lower) * tokens
    recomputed = shape.layers * shape.hidden * computed * tokens + kept
    activations = recomputed if trainer.gradient_checkpointing else shape.layers * kept
    logits = min(LOGITS_BYTES, 4 * MASTER_BYTES * shape.vocabulary * tokens)
    held_each = 2 if trainer.offload_optimizer else 4
    moments = int(2 * (trained + adapters) * MASTER_BYTES)
    parts = {
        "weights": (own + adapters) * MASTER_BYTES,
        "gradients": (trained + adapters) * MASTER_BYTES,
        "optimizer": 0 if trainer.offload_optimizer else moments,
        "gathered": _count_gathered(shape, computed, bool(trained), activations + logits) if processes > 1 else 0,
        "copy": shape.parameters * computed if processes == 1 and lower else 0,
        "activations": activations,
        "logits": logits,
        "critic": held_each * own * MASTER_BYTES if configuration.learner.advantage_estimator == "gae" else 0,
        "reference": own * MASTER_BYTES if configuration.algorithm.pulls_to_a_model and not trainer.lora_rank else 0,
        "runtime": RUNTIME_BYTES if on_gpu else 0,
    }
    held = {name: int(size) for name, size in parts.items() if size}
    return Parts(name="learner", parts=held, note=f"{tokens:,} tokens at a time", moments=moments)


def _count_gathered(shape: ModelShape, computed: int, trains: bool, passing: float) -> float:
    """Bytes that FSDP gathers: the embedding and the head from the first layer to the last, of the others one and the next.

    The most is held at the end of the forward pass, with the head's gradient, or at the end of the backward pass, when nothing
    is left of what was ``passing`` through, and the gradients of both are copied to be reduced."""
    first = computed * (shape.embedding + 2 * shape.layer)
    if not trains:
        return first
    last = (2 * computed + MASTER_BYTES) * shape.embedding
    return max(first + computed * shape.vocabulary * shape.hidden, last - passing)


def plan_engine(shape: ModelShape, configuration: Configuration, memory: int) -> Parts:
    """One of the GPUs, of ``memory`` bytes, of a vLLM worker; what is left is cache. Its note counts sequences of full length,
    on all GPUs of the worker together."""
    inference = configuration.inference
    arguments, number = parse_engine_arguments(inference.vllm), MASTER_BYTES if inference.dtype == "float32" else 2
    split = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    weights = shape.parameters * number // split
    sequence = shape.count_cached() * number * inference.max_model_len // split
    share = arguments.get("gpu_memory_utilization", ENGINE_SHARE)
    left = int(memory * share) - weights - ENGINE_OVERHEAD
    cache = inference.kv_cache_mib << 20 or max(left, sequence)
    parts = {"weights": weights, "cache": cache, "activations": ENGINE_OVERHEAD, "runtime": RUNTIME_BYTES}
    on = f" on {split} GPUs" if split > 1 else ""
    note = f"cache for {cache // sequence} sequences of {inference.max_model_len:,} tokens{on}"
    return Parts(name="inference", parts=parts, note=note)


def plan_torch_engine(shape: ModelShape, configuration: Configuration) -> Parts:
    """An engine torch on a GPU while it takes over weights: those that it was opened with, those that it computes with, those
    that came and what is made of them, and keys and values in float32 of as many sequences as it decodes and a spare one. Each
    has room for the longest that was ever decoded, which is given out by doubling."""
    inference = configuration.inference
    length = min(inference.max_model_len, 2 * configuration.episode.max_episode_tokens)
    held = (inference.max_num_seqs + 1) * length * shape.count_cached() * MASTER_BYTES
    cache = int(TORCH_GROWTH * held) + TORCH_REMEMBERED_BYTES
    parts = {"weights": TORCH_COPIES * MASTER_BYTES * shape.parameters, "cache": cache, "runtime": RUNTIME_BYTES}
    return Parts(name="inference", parts=parts, note=f"cache for {inference.max_num_seqs} sequences of {length:,} tokens")


def count_usable(memory: int) -> int:
    """Bytes of a GPU of ``memory`` that a plan may use."""
    return int(memory * (1 - FRAGMENT_SHARE))


def count_tokens(configuration: Configuration) -> int:
    """The most tokens of one forward pass of the learner."""
    trainer, longest = configuration.trainer, configuration.episode.max_episode_tokens
    longest = min(longest, trainer.max_tokens or longest)
    budget = trainer.token_budget or longest * configuration.learner.micro_batch_size
    return max(budget, longest)


def _count_adapters(shape: ModelShape, rank: int) -> int:
    """Of adapters beside all linear layers, whole in every process; experts are none."""
    attention = shape.head_dim * (shape.heads + shape.kv_heads)
    width = 0 if shape.experts else shape.intermediate
    return rank * shape.layers * (4 * shape.hidden + 2 * attention + 3 * (shape.hidden + width) * bool(width))
