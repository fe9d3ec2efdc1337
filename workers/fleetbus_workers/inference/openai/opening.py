"""Opens OpenAI-compatible servers as the configuration says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread

from fleetbus_schemas import ChatMessage
from fleetbus_workers.inference.engine_context import EngineContext
from fleetbus_workers.inference.openai.model_server import SERVER_KEY, parse_urls
from fleetbus_workers.inference.openai.sampler import OpenAISampler
from fleetbus_workers.inference.weight_folders import WeightFolders


@asynccontextmanager
async def open_engine(context: EngineContext) -> AsyncIterator[OpenAISampler]:
    """See `fleetbus_workers.inference.engine_context`. The servers were asked what they can do."""
    servers = await anyio.to_thread.run_sync(_open, context)
    await servers.probe()
    yield servers


def _open(context: EngineContext) -> OpenAISampler:
    settings = context.configuration.inference
    return OpenAISampler(
        parse_urls(settings.urls),
        codec=context.template,
        prompt=context.template.encode_prompt([ChatMessage(role="user", content="Hello")], []),
        purpose=settings.purpose,
        model=settings.served_model_name,
        key=os.environ.get(SERVER_KEY, ""),
        slots=settings.slots,
        max_model_len=settings.max_model_len,
        weights=WeightFolders(context.folder, context.served, untie=True) if settings.purpose == "train" else None,
    )
