"""`OpenAISampler` on servers of a test: what is asked of it, and versions of weights for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio

from fleetbus_schemas import PolicyPublished, SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.openai import OpenAISampler
from fleetbus_workers.inference.weight_folders import WeightFolders
from tests.support.model_server import STOP, ByteCodec, ModelServer

PROMPT = [5, 6, 7]
LIMIT_SECONDS = 50

MakeServer = Callable[..., ModelServer]


@asynccontextmanager
async def open_sampler(*servers: ModelServer, purpose: str = "train", **options: object) -> AsyncIterator[OpenAISampler]:
    urls = [server.url for server in servers]
    sampler = OpenAISampler(urls, codec=ByteCodec(), prompt=PROMPT, purpose=purpose, **options)  # type: ignore[arg-type]
    with anyio.fail_after(LIMIT_SECONDS):
        async with sampler.run():
            yield sampler


def make_request(
    prompt: list[int] = PROMPT, *, episode: str = "e1", tokens: int = 6, trained: bool = True, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        cache_key=episode,
        ids=prompt,
        sampling=SamplingSettings(**sampling),
        stop_ids=frozenset({STOP}),
        max_tokens=tokens,
        seed=2**64 - 1,
        trained=trained,
    )


class Weights:
    """A tiny model folder and versions of it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        save_file({"a": torch.zeros(2, 3)}, self.model / "model.safetensors")

    @property
    def reloadable(self) -> WeightFolders:
        return WeightFolders(self.model, self.folder / "served")

    def published(self, version: int, *, step: int = 1, shape: tuple[int, ...] = (2, 3)) -> PolicyPublished:
        import torch

        from fleetbus_workers.weights.file import write_weights

        file = self.folder / f"v{version}.safetensors"
        manifest = write_weights(file, {"a": torch.full(shape, float(version))})
        return PolicyPublished(
            policy="default", version=version, lineage="l", step=step, uri=file.as_uri(), manifest=manifest, size_bytes=1
        )


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # another thread's state
        await anyio.sleep(0.005)


@contextmanager
def model_servers() -> Iterator[MakeServer]:
    """Starts servers as they are asked for; all are stopped at the end."""
    started: list[ModelServer] = []

    def make(**options: object) -> ModelServer:
        started.append(ModelServer(**options).start())  # type: ignore[arg-type]
        return started[-1]

    try:
        yield make
    finally:
        for server in started:
            server.stop()
