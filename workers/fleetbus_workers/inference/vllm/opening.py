"""Opens vLLM as the configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread

from fleetbus.config.engine_arguments import parse_engine_arguments
from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.vllm.engine import EngineSettings
from fleetbus_workers.inference.vllm.sampler import VllmSampler


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[VllmSampler]:
    """See `fleetbus_workers.inference.engine_context`. Its processes end with the block."""
    make = partial(VllmSampler, _select_settings(context), place=context.served, processor=context.processor)
    sampler = await anyio.to_thread.run_sync(make)
    try:
        yield sampler
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(sampler.close)


def _select_settings(context: EngineContext) -> EngineSettings:
    settings, trainer = context.configuration.inference, context.configuration.trainer
    return EngineSettings(
        folder=context.folder,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        dtype=settings.dtype,
        head_dtype=settings.head_dtype,
        kv_cache_mib=settings.kv_cache_mib,
        lora_rank=trainer.lora_rank if trainer.published_weights == "adapters" else 0,
        keeps_cache=settings.kv_cache_after_swap == "keep",
        options=parse_engine_arguments(settings.vllm),
    )
