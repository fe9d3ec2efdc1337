"""An object store in memory, for what only reads or stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fleetbus.bus.memory_objects import MemoryObjectStore


class Bucket(MemoryObjectStore):
    """An object store in memory, which may fail or wait."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        super().__init__(self.objects)
        self.failure: Exception | None = None
        self.wait: Callable[[], Awaitable[None]] | None = None
        self.gets = 0

    async def get(self, name: str, file: Path) -> None:
        await self._before_get()
        await super().get(name, file)

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        await self._before_get()
        return await super().get_bytes(name, max_bytes=max_bytes)

    async def _before_get(self) -> None:
        self.gets += 1
        if self.wait is not None:
            await self.wait()
        if self.failure is not None:
            raise self.failure
