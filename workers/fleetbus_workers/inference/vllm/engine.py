"""Starts and stops a vLLM engine: its arguments, and the environment variables that it reads when it is imported.

Everything here blocks for seconds to minutes and is called in a worker thread.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.config.engine_arguments import PARALLEL
from fleetbus.errors import UserError
from fleetbus_workers.inference.vllm.load_recorder import LoadRecorder

CPU_CACHE_MIB = 512
"""Keys and values on a CPU unless configured: left alone, vLLM would take 92 % of the machine's memory."""

STOP_SECONDS = 3.0
"""For an engine's processes to end by themselves; under `up` a worker has a few seconds in all."""

CPU_BATCH_TOKENS = 4096
"""Most prompt tokens of one step on a CPU, where prompts are never computed in parts."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ADAPTERS = 2
"""Adapters that one step computes with: turns that began before a swap end with the one that they began with."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has asked CUDA anything cannot use it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked of its driver, and CUDA stays untouched here
}
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first token takes half a minute of compiling, although execution is eager
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound by itself, every engine of a machine takes the same core
}


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an engine is started with. ``kv_cache_mib`` 0: `CPU_CACHE_MIB` on a CPU, 90 % of a GPU's memory there.
    ``head_dtype`` is what logits are computed in: float32, or "model" for ``dtype``. ``lora_rank``: of the adapters that
    versions are, 0 if they are whole models. ``keeps_cache``: turns that run when the weights change continue from the keys and
    values that they have. ``options`` are further arguments of vLLM's own, which outweigh those from here."""

    folder: Path
    slots: int = 32
    max_model_len: int = 2048
    threads: int = 1
    dtype: str = "float32"
    head_dtype: str = "float32"
    kv_cache_mib: int = 0
    lora_rank: int = 0
    keeps_cache: bool = False
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def count_processes(self) -> int:
        """The engine's processes that compute, each with a part of the model or a copy."""
        return math.prod(int(self.options.get(name, 1)) for name in PARALLEL)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process; one that the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def is_gpu_available() -> bool:
    """True if vLLM will run on a GPU here; CUDA is not begun by asking."""
    set_variables(ENVIRONMENT)
    import torch

    return bool(torch.cuda.is_available())


def start_engine(settings: EngineSettings, recorder: LoadRecorder) -> object:
    """A running ``AsyncLLM``, which reports to ``recorder`` how busy it is. Raises `UserError` if vLLM is missing or cannot run
    this model here."""
    has_gpu = is_gpu_available()
    set_variables({} if has_gpu else CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(settings.threads)})
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ModuleNotFoundError:
        raise
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"vllm cannot be imported: {_first_line(error)}; on a CPU, uninstall torchvision and torchaudio"
        ) from error
    try:
        arguments = AsyncEngineArgs(**build_engine_arguments(settings, has_gpu=has_gpu))
    except TypeError as error:
        raise UserError(f"inference.vllm: vllm does not take this: {_first_line(error)}") from error
    try:
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[recorder.attach])
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{settings.folder}: vllm cannot run this model here: {_first_line(error)}") from error


def build_engine_arguments(settings: EngineSettings, *, has_gpu: bool) -> dict[str, Any]:
    """Build the arguments of ``AsyncEngineArgs``. Raises `UserError`."""
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.9}
    if settings.kv_cache_mib or not has_gpu:
        memory = {"kv_cache_memory_bytes": (settings.kv_cache_mib or CPU_CACHE_MIB) << 20}
    if not has_gpu:  # a seeded request whose prompt is computed in parts ends the engine: "CPU Generator does not use offset"
        memory |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(settings.max_model_len, CPU_BATCH_TOKENS)}
    wanted: dict[str, Any] = {
        "model": str(settings.folder),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.slots,
        "enforce_eager": not has_gpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": "fleetbus_workers.inference.vllm.worker_extension.WorkerExtension",
    }
    wanted |= memory | _build_adapter_arguments(settings.lora_rank) | settings.options
    if settings.head_dtype == "float32" and settings.dtype != "float32":
        wanted["hf_overrides"] = {"head_dtype": "float32"} | wanted.get("hf_overrides", {})
    return wanted


def _build_adapter_arguments(rank: int) -> dict[str, object]:
    """Room for adapters of ``rank``: those that running turns began with, and the next ones."""
    if not rank:
        return {}
    room = next((size for size in LORA_RANKS if size >= rank), None)
    if room is None:
        raise UserError(f"trainer.lora_rank = {rank}: vllm takes adapters of up to rank {LORA_RANKS[-1]}")
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": ADAPTERS, "max_cpu_loras": 2 * ADAPTERS}


def stop_engine(engine: Any) -> None:
    """End the engine and its processes; harmless on one that is dead."""
    engine.shutdown(timeout=STOP_SECONDS)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
