"""Images in the run's object bucket: stored once under their hash, before the message that names them.

Above it are the environments, which are given `build_image_store` as a function; below it the object store of the bus.
"""

import hashlib
from collections import OrderedDict

from fleetbus.bus.base import LogBus
from fleetbus.bus.objects import ObjectStore, put_content
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Image
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage
from fleetbus_workers.weights.store import get_image_store

MAX_REMEMBERED_NAMES = 4096
"""Hashes that are remembered as stored; a forgotten one is stored again, which is harmless."""


def build_image_store(objects: ObjectStore) -> StoreImage:
    """The function that stores an image in ``objects``. What it raises fails the episode: no reference to nothing."""
    stored_names: OrderedDict[str, None] = OrderedDict()

    async def store_image(picture: EncodedImage) -> Image:
        name = hashlib.sha256(picture.data).hexdigest()
        if name not in stored_names:
            await put_content(objects, picture.data)
            stored_names[name] = None
            if len(stored_names) > MAX_REMEMBERED_NAMES:
                stored_names.popitem(last=False)
        return Image(object=name, media_type=picture.media_type, width=picture.width, height=picture.height)

    return store_image


def build_run_image_store(bus: LogBus, configuration: Configuration) -> StoreImage | None:
    """The same for the bucket of a run; None where the bus has no object store."""
    objects = get_image_store(bus, configuration.run.name)
    return None if objects is None else build_image_store(objects)
