"""Opens the embedded engine as the configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
import torch

from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.torch.precision import computes_bfloat16
from fleetbus_workers.inference.torch.sampler import TorchSampler


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[TorchSampler]:
    """See `fleetbus_workers.inference.engine_context`. Cancelled while it reads the model, it does not wait for its thread."""
    yield await anyio.to_thread.run_sync(_open, context, abandon_on_cancel=True)


def _open(context: EngineContext) -> TorchSampler:
    settings = context.configuration.inference
    rounded = settings.dtype == "bfloat16" or (settings.dtype == "auto" and computes_bfloat16())
    return TorchSampler(
        context.folder,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        dtype=torch.bfloat16 if rounded else torch.float32,
        processor=context.processor,
    )
