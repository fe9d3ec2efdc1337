"""Arguments of vLLM that are passed on as they are, and how many GPUs an engine with them takes. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE

OWN_SETTINGS = {
    "model": "run.model",
    "dtype": "inference.dtype",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "kv_cache_memory_bytes": "inference.kv_cache_mib",
    "enable_lora": "trainer.published_weights",
    "max_lora_rank": "trainer.lora_rank",
}
"""Arguments that follow from a setting."""

FIXED = frozenset({"logprobs_mode", "worker_extension_cls", "skip_tokenizer_init", "tokenizer"})
"""Arguments without which the tokens' log-probabilities or the swaps of weights would be wrong."""

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def parse_engine_arguments(text: str) -> dict[str, Any]:
    """Parse the setting ``inference.vllm``. Raises `UserError` for what is no JSON object, or is not to be set there."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except UNREADABLE as error:
        raise UserError(f'inference.vllm = {text[:80]}: write a JSON object, such as {{"tensor_parallel_size": 2}}') from error
    for name in found:
        if name in OWN_SETTINGS:
            raise UserError(f"inference.vllm: {name} follows from {OWN_SETTINGS[name]}: set that")
        if name in FIXED:
            raise UserError(f"inference.vllm: {name} is fixed, because training needs it as it is: leave it out")
    for name in PARALLEL:
        if not isinstance(size := found.get(name, 1), int) or size < 1:
            raise UserError(f"inference.vllm: {name} = {size!r} is no whole number, at least 1")
    return found


def count_engine_gpus(text: str) -> int:
    """GPUs of one engine. Raises as `parse_engine_arguments`."""
    found = parse_engine_arguments(text)
    return math.prod(found.get(name, 1) for name in PARALLEL)
