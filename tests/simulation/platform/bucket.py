"""The object store of a simulated server: slow, unreachable while the server is, and without half objects."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from fleetbus.bus.base import Bus
from fleetbus.bus.objects import ObjectMissing, ObjectTooLarge, check_object_name


class SimulatedObjects:
    """See `fleetbus.bus.objects.ObjectStore`; ``contents`` are the server's."""

    def __init__(self, contents: MutableMapping[str, bytes], wire: Bus) -> None:
        self._contents = contents
        self._wire = wire

    async def put(self, name: str, file: Path) -> None:
        await self.put_bytes(name, file.read_bytes())  # noqa: ASYNC240 - virtual time knows no threads

    async def put_bytes(self, name: str, content: bytes) -> None:
        await self._wire.log_state()  # as far away as the log is
        self._contents[check_object_name(name)] = content
        await self._wire.log_state()

    async def get(self, name: str, file: Path) -> None:
        file.write_bytes(await self._read(name))  # noqa: ASYNC240

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        content = await self._read(name)
        if len(content) > max_bytes:
            raise ObjectTooLarge(f"object {name} has {len(content)} bytes, more than {max_bytes}")
        return content

    async def remove(self, name: str) -> None:
        await self._wire.log_state()
        self._contents.pop(check_object_name(name), None)

    async def _read(self, name: str) -> bytes:
        await self._wire.log_state()
        if check_object_name(name) not in self._contents:
            raise ObjectMissing(f"object {name} is not in the bucket")
        return self._contents[name]
