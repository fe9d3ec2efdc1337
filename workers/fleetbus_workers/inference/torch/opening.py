"""Opens the embedded engine as the configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from fleetbus.errors import UserError
from fleetbus.processors import multiplies_bfloat16
from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.loading import load_alone
from fleetbus_workers.inference.torch.sampler import TorchSampler


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[TorchSampler]:
    """See `fleetbus_workers.inference.engine_context`. Cancelled while it reads the model, it does not wait for its thread."""
    yield await load_alone(_open, context)


def _open(context: EngineContext) -> TorchSampler:
    settings = context.configuration.inference
    device = resolve_device(settings.device)
    rounded = settings.dtype == "bfloat16" or (settings.dtype == "auto" and _computes_bfloat16(device))
    return TorchSampler(
        context.folder,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        device=device,
        dtype=torch.bfloat16 if rounded else torch.float32,
        processor=context.processor,
    )


def _computes_bfloat16(device: str) -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.startswith("cuda") else multiplies_bfloat16()


def resolve_device(name: str) -> str:
    """The device of that name, ``auto``: a GPU if there is one. Raises `UserError` for one that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"inference.device = {name} cannot be used: {reason}; see nvidia-smi, or set it to cpu") from error
    return name
