"""An object store in memory, for what only reads or stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio

from fleetbus.bus.objects import ObjectMissing


class Bucket:
    """An object store in memory, which may fail or wait."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.failure: Exception | None = None
        self.wait: Callable[[], Awaitable[None]] | None = None
        self.gets = 0

    async def put(self, name: str, file: Path) -> None:
        self.objects[name] = await anyio.Path(file).read_bytes()

    async def get(self, name: str, file: Path) -> None:
        self.gets += 1
        if self.wait is not None:
            await self.wait()
        if self.failure is not None:
            raise self.failure
        if name not in self.objects:
            raise ObjectMissing(f"object {name} is not in the bucket")
        await anyio.Path(file).write_bytes(self.objects[name])

    async def remove(self, name: str) -> None:
        self.objects.pop(name, None)
