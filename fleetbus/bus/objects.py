"""Large files beside the log: what workers know of an object store. `fleetbus.bus.nats.objects` has it over JetStream.

The one place where the name of an object is checked. Names come out of messages that anybody may have written, and some
readers make files of them; every store refuses a name that `check_object_name` refuses, even if its caller checked it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from fleetbus_schemas.channels import BY_NAME

MAX_OBJECT_BYTES = 64 << 20
"""Of an object that is read into memory: images, and manifests of weights."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASHED_AT_ONCE_BYTES = 1 << 20
"""More than this is hashed in a thread."""


def weights_bucket(run: str) -> str:
    """The bucket of a run's weights."""
    return BY_NAME["weights"].address.split(".")[1].format(run=run)


def images_bucket(run: str) -> str:
    """The bucket of a run's images: environment workers store in it and remove nothing
    (docs/decisions/0245-quotas-per-key-and-images-apart.md)."""
    return BY_NAME["images"].address.split(".")[1].format(run=run)


class ObjectMissing(Exception):
    """The store has no whole object of that name; the message is one line that names it."""


class InvalidObjectName(ObjectMissing):
    """No object can have that name."""


class ObjectTooLarge(ObjectMissing):
    """The object has more bytes than its reader takes."""


class ObjectReader(Protocol):
    """The part of a store that `get_content` needs."""

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """See `ObjectStore`."""


class ObjectStore(Protocol):
    """Named files of one bucket. Names are written once; a reader finds all of an object or nothing.

    Every call raises `InvalidObjectName` for a name that `check_object_name` refuses.
    """

    async def put(self, name: str, file: Path) -> None:
        """Store a file; when this returns, every process can read it. Raises `OSError` or `fleetbus.errors.BusError`."""

    async def put_bytes(self, name: str, content: bytes) -> None:
        """As `put`, of what is in memory."""

    async def get(self, name: str, file: Path) -> None:
        """Write an object to a file and check its digest. Raises `ObjectMissing`, `OSError` or `fleetbus.errors.BusError`;
        then the file is not there."""

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """The content of an object of at most ``max_bytes``, checked as by `get`; a longer one is `ObjectTooLarge`, and no more
        of it than that is ever in memory. Raises `ObjectMissing` or `fleetbus.errors.BusError`."""

    async def remove(self, name: str) -> None:
        """Remove an object; removing what is not there is harmless."""


def check_object_name(name: str) -> str:
    """The name, if it can be the name of an object, and so of a file in a folder; raises `InvalidObjectName`."""
    if _NAME.fullmatch(name) is None:
        raise InvalidObjectName(f"{name[:80]!r} is not the name of an object: letters, digits, '.', '_' and '-', at most 200")
    return name


def check_content_hash(name: str) -> str:
    """The name, if it is a SHA-256 in lower-case hex; raises `InvalidObjectName`."""
    if _HASH.fullmatch(name) is None:
        raise InvalidObjectName(f"{name[:80]!r} is no SHA-256")
    return name


async def put_content(objects: ObjectStore, content: bytes) -> str:
    """Store bytes under their SHA-256 and return it; raises `OSError` or `fleetbus.errors.BusError`."""
    name = await _hash(content)
    await objects.put_bytes(name, content)
    return name


async def get_content(objects: ObjectReader, name: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
    """The bytes whose SHA-256 is ``name``; raises `ObjectMissing` or `fleetbus.errors.BusError`."""
    content = await objects.get_bytes(check_content_hash(name), max_bytes=max_bytes)
    if await _hash(content) != name:
        raise ObjectMissing(f"what the bucket has as {name} has another hash")
    return content


async def _hash(content: bytes) -> str:
    if len(content) <= _HASHED_AT_ONCE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return await anyio.to_thread.run_sync(lambda: hashlib.sha256(content).hexdigest())
