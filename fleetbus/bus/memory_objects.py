"""An object store in memory: of a replay, and of tests. See `fleetbus.bus.objects.ObjectStore`."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import anyio

from fleetbus.bus.objects import ObjectMissing, ObjectTooLarge, check_object_name


class MemoryObjectStore:
    """Objects by name in ``contents``, which the caller may share."""

    def __init__(self, contents: MutableMapping[str, bytes], *, missing: str = "object {} is not in the bucket") -> None:
        self._contents = contents
        self._missing = missing

    async def put(self, name: str, file: Path) -> None:
        await self.put_bytes(name, await anyio.Path(file).read_bytes())

    async def put_bytes(self, name: str, content: bytes) -> None:
        self._contents[check_object_name(name)] = content

    async def get(self, name: str, file: Path) -> None:
        await anyio.Path(file).write_bytes(self._get(name))

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        content = self._get(name)
        if len(content) > max_bytes:
            raise ObjectTooLarge(f"object {name} has {len(content)} bytes, more than {max_bytes}")
        return content

    async def remove(self, name: str) -> None:
        self._contents.pop(check_object_name(name), None)

    def _get(self, name: str) -> bytes:
        if check_object_name(name) not in self._contents:
            raise ObjectMissing(self._missing.format(name))
        return self._contents[name]
