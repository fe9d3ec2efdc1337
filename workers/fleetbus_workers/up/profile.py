"""Settings that follow the machine: on one with GPUs a model of yours is trained in bfloat16 on them, by vLLM and torch.

Defaults are those of the starter policy on a laptop. What is chosen instead is said in one line; what anybody set stays.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbus.config.engine_arguments import count_engine_gpus
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.up.memory import ModelShape, plan_engine, plan_learner

TOKEN_BUDGET = 16_384
FULL_RATE = 1e-6
"""Learning rate of all weights of a pretrained model, as TRL, prime-rl and verl have it by default."""

ADAPTER_RATE = 1e-5
"""Of adapters: about ten times as much ("LoRA Without Regret", thinkingmachines.ai, 2025)."""

ENOUGH_TOKENS = 65_536
"""In an engine's cache, eight sequences of 8,192: with fewer, each token waits for the weights to be read nearly for itself."""

PROFILE: dict[str, Any] = {
    "inference.engine": "vllm",
    "inference.dtype": "bfloat16",
    "inference.max_num_seqs": 64,
    "trainer.device": "cuda",
    "trainer.precision": "bfloat16",
    "trainer.published_dtype": "bfloat16",
    "trainer.gradient_checkpointing": True,
    "trainer.token_budget": TOKEN_BUDGET,
    "algorithm.reduction": "token_mean",  # as TRL, verl and prime-rl have it by default
    "learner.checkpoint_every": 20,
    "episode.max_tokens": 1024,
    "limits.action": 1800.0,
}


def fit_machine(
    configuration: Configuration,
    given: Mapping[str, str],
    gpus: Sequence[str],
    memory: int,
    shape: ModelShape | None,
    *,
    starts: bool = True,
) -> tuple[Configuration, str]:
    """The configuration for this machine, and one line that says what was chosen; empty if nothing was. ``memory``: bytes of
    the smallest GPU, 0 if unknown; ``shape`` None if the model's is unknown. Raises `UserError` if the engine is not there,
    unless nothing ``starts``."""
    local = configuration.learner.trainer == "torch" and configuration.inference.engine in ("torch", "vllm")
    if not gpus or not configuration.run.model or not local:
        return configuration, ""
    rate = ADAPTER_RATE if configuration.trainer.lora_rank else FULL_RATE
    wanted = {name: value for name, value in (PROFILE | {"learner.learning_rate": rate}).items() if name not in given}
    if "trainer.device" in given and configuration.trainer.device == "cpu":
        wanted = {name: value for name, value in wanted.items() if name.partition(".")[0] not in ("trainer", "learner")}
    if len(gpus) == 1 and "trainer.device" in wanted:  # two roles share no GPU, and training gains more from it
        wanted.pop("inference.engine", None)
    if starts and wanted.get("inference.engine") == "vllm":
        _check_engine(configuration)
    if configuration.inference.engine == "torch" and "inference.engine" not in wanted:
        wanted = {name: value for name, value in wanted.items() if name not in ("inference.dtype", "inference.max_num_seqs")}
    fitted = _replace(configuration, wanted)
    if fitted.inference.engine == "vllm" and len(gpus) > 1:
        if "inference.vllm" not in given and "inference.workers" not in given:
            fitted = split_engine(fitted, len(gpus), memory, shape)
            if fitted.inference.vllm:
                wanted["inference.vllm"] = fitted.inference.vllm
        if "inference.workers" not in given:
            wanted["inference.workers"] = choose_workers(fitted, len(gpus), memory, shape)
        fitted = _replace(fitted, wanted)
    if not wanted:
        return fitted, ""
    size = f", {shape.parameters / 1e9:.1f} B parameters" if shape is not None else ""
    of = f" of {memory / 1e9:.0f} GB" if memory else ""
    chosen = ", ".join(f"{name} = {_format(value)}" for name, value in wanted.items())
    note = "; engine torch computes on the CPU" if fitted.inference.engine == "torch" else ""
    return fitted, f"chosen for {len(gpus)} GPU(s){of} and a model of yours{size}: {chosen}{note}"


def choose_workers(configuration: Configuration, gpus: int, memory: int, shape: ModelShape | None) -> int:
    """Choose the number of inference workers: on half of the GPUs, or on as many as leave the learner enough to fit."""
    each = count_engine_gpus(configuration.inference.vllm)
    most = max(gpus // 2 // each, 1) if configuration.trainer.device != "cpu" else max(gpus // each, 1)
    if shape is None or not memory or configuration.trainer.device == "cpu":
        return most
    fitting = (count for count in range(most, 0, -1) if plan_learner(shape, configuration, gpus - count * each).total <= memory)
    return next(fitting, 1)


def split_engine(configuration: Configuration, gpus: int, memory: int, shape: ModelShape | None) -> Configuration:
    """The configuration with tensor parallelism over the least GPUs, at most half of them, on which the model leaves a cache of
    `ENOUGH_TOKENS`; as it is if one suffices, or none do."""
    if shape is None or not memory:
        return configuration
    for size in (1, 2, 4, 8):
        if size > max(gpus // 2, 1) or shape.kv_heads % size:
            break
        arguments = msgspec.json.encode({"tensor_parallel_size": size}).decode() if size > 1 else ""
        tried = _replace(configuration, {"inference.vllm": arguments})
        engine = plan_engine(shape, tried, memory)
        if engine.total <= memory and size * engine.parts["cache"] >= ENOUGH_TOKENS * shape.count_cached() * 2:
            return tried
    return configuration


def _check_engine(configuration: Configuration) -> None:
    if not configuration.inference.python and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "engine torch computes on the CPU, and this machine has GPUs: pip install 'fleetbus[vllm]', or name an interpreter "
            "that has it (--inference-python), or ask for --inference-engine torch"
        )


def _replace(configuration: Configuration, values: Mapping[str, object]) -> Configuration:
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    changed = {table: msgspec.structs.replace(getattr(configuration, table), **keys) for table, keys in tables.items()}
    return msgspec.structs.replace(configuration, **changed)


def _format(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
