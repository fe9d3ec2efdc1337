"""Episodes on a server of the Open Reward Standard, opened and closed around a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from fleetbus.config.settings import Configuration, LimitSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.tool_calls import NoGrader


def build(spec: str, *, prompt: Any = "compact", seconds: float = 30) -> Any:
    settings = Configuration(limits=LimitSettings(tool_call=seconds))
    return build_environment_factory(spec, verifier=NoGrader(), prompt=prompt, configuration=settings)


@asynccontextmanager
async def episode(factory: Any, index: int = 0, split: str = "train", **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    environment = factory()
    with anyio.fail_after(50):
        try:
            await environment.open(Task(key="t", prompt="", config={"split": split, "index": index, **config}))
            yield environment, await environment.reset()
        finally:
            await environment.close()


@asynccontextmanager
async def playing(url: str, index: int = 0, split: str = "train", *, prompt: Any = "compact", **config: Any) -> Any:
    factory = build(f"ors:{url}#Order", prompt=prompt)
    async with factory.run(), episode(factory, index, split, **config) as (environment, start):
        yield environment, start


def read_words(start: Any) -> list[str]:
    return str(start.messages[-1].content).splitlines()[1].split()
