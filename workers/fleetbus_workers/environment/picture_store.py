"""Images in the run's object bucket: stored once under their hash, before the message that names them.

Above it are the environments, which are given `keep_pictures` as a function; below it the object store of the bus.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from pathlib import Path

import anyio

from fleetbus.bus.base import Bus
from fleetbus.bus.objects import ObjectStore
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Image
from fleetbus_workers.environment.pictures import KeepPicture, Picture
from fleetbus_workers.weights.store import objects_of

MAX_KNOWN = 4096
"""Hashes that are remembered as stored; a forgotten one is stored again, which is harmless."""


def keep_pictures(objects: ObjectStore) -> KeepPicture:
    """The function that stores an image in ``objects``. What it raises fails the episode: no reference to nothing."""
    known: OrderedDict[str, None] = OrderedDict()

    async def keep(picture: Picture) -> Image:
        name = hashlib.sha256(picture.data).hexdigest()
        if name not in known:
            await _stored(objects, name, picture.data)
            known[name] = None
            if len(known) > MAX_KNOWN:
                known.popitem(last=False)
        return Image(object=name, media_type=picture.media_type, width=picture.width, height=picture.height)

    return keep


def keep_pictures_of(bus: Bus, configuration: Configuration) -> KeepPicture | None:
    """The same for the bucket of a run; None where the bus has no object store."""
    objects = objects_of(bus, configuration.run.name)
    return None if objects is None else keep_pictures(objects)


async def _stored(objects: ObjectStore, name: str, data: bytes) -> None:
    folder = await anyio.to_thread.run_sync(tempfile.TemporaryDirectory)
    try:
        file = Path(folder.name) / name
        await anyio.Path(file).write_bytes(data)
        await objects.put(name, file)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(folder.cleanup)
