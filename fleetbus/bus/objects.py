"""Large files beside the log: what workers know of an object store. `fleetbus.bus.nats.objects` has it over JetStream."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


def weights_bucket(run: str) -> str:
    """The bucket of a run's weights."""
    return f"fbweights_{run}"


class ObjectMissing(Exception):
    """The store has no whole object of that name; the message is one line that names it."""


class ObjectStore(Protocol):
    """Named files of one bucket. Names are written once; a reader finds all of an object or nothing."""

    async def put(self, name: str, file: Path) -> None:
        """Store a file; when this returns, every process can read it. Raises `OSError` or `fleetbus.errors.BusError`."""

    async def get(self, name: str, file: Path) -> None:
        """Write an object to a file and check its digest. Raises `ObjectMissing`, `OSError` or `fleetbus.errors.BusError`;
        then the file is not there."""

    async def remove(self, name: str) -> None:
        """Remove an object; removing what is not there is harmless."""
