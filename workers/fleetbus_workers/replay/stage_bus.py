"""The bus of a worker under test: the in-memory one, of which nothing is ever cut, killed or lost.

What remains of a publish is one step to the server and the storing itself, so a replay spends its time in the worker.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel

from fleetbus.bus.base import PublishAck
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import HEADER_BYTES, MAX_PAYLOAD_BYTES, MemoryBus
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError


class StageObjects:
    """`ObjectStore` of the objects that a recording holds, and of those that the worker under test stores."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents

    async def put(self, name: str, file: Path) -> None:
        self._contents[name] = await anyio.Path(file).read_bytes()

    async def get(self, name: str, file: Path) -> None:
        if name not in self._contents:
            raise ObjectMissing(f"the recording holds no object {name}")
        await anyio.Path(file).write_bytes(self._contents[name])

    async def remove(self, name: str) -> None:
        self._contents.pop(name, None)


class StageBus(MemoryBus):
    """`MemoryBus` without the faults that it can be told to make, and with objects."""

    contents: dict[str, bytes]

    def objects(self, bucket: str) -> ObjectStore:
        """There is one bucket."""
        return StageObjects(self.contents)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        if len(payload) + HEADER_BYTES > MAX_PAYLOAD_BYTES:
            raise BusError(f"{subject}: {len(payload)} bytes and headers exceed the server's limit of {MAX_PAYLOAD_BYTES}")
        await anyio.lowlevel.checkpoint()
        stream = self._server.stream_for(subject)
        return stream.store(subject, payload, message_id or self._new_id(), expected_last, self._server.now_ns())

    async def _reach(self, what: str) -> None:
        await anyio.lowlevel.checkpoint()


def stage_bus(server: MemoryServer, run: str, worker: str, objects: dict[str, bytes]) -> StageBus:
    """A client of ``server`` that stays connected for as long as it is used, with these objects in its bucket."""
    bus = StageBus(server, MemoryConnection(True), run, worker, 0)
    bus.contents = dict(objects)
    return bus
