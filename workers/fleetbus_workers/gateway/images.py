"""Images on their way to a client: read from where the environment put them, in the wanted format. Codecs run in threads."""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from PIL import Image as Pillow

from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus_schemas import ChatMessage, Image
from fleetbus_schemas.chat import Text
from fleetbus_workers.environment.pictures import Picture
from fleetbus_workers.gateway.image_format import ImageFormat, unstrippable

LoadImage = Callable[[Image], Awaitable[bytes]]
"""The bytes of a referenced image; raises `ObjectMissing` when they are gone."""

PLACEHOLDER = "<image>"
PNG = ImageFormat()
MAX_KEPT_BYTES = 256 << 20


class MemoryImages:
    """Images of a service that has everything in one process; the oldest make room for new ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    async def keep(self, picture: Picture) -> Image:
        name = hashlib.sha256(picture.data).hexdigest()
        if name not in self._kept:
            self._kept[name] = picture.data
            self._bytes += len(picture.data)
        self._kept.move_to_end(name)
        while self._bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return Image(object=name, media_type=picture.media_type, width=picture.width, height=picture.height)

    async def load(self, image: Image) -> bytes:
        if image.object not in self._kept:
            raise ObjectMissing(f"image {image.object[:12]} made room for newer ones")
        return self._kept[image.object]


def load_from(objects: ObjectStore) -> LoadImage:
    """Images of a run's object bucket."""

    async def load(image: Image) -> bytes:
        folder = await anyio.to_thread.run_sync(tempfile.TemporaryDirectory)
        try:
            file = Path(folder.name) / image.object
            await objects.get(image.object, file)
            return await anyio.Path(file).read_bytes()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(folder.cleanup)

    return load


async def text_and_images(
    messages: Sequence[ChatMessage], load: LoadImage | None, wanted: ImageFormat = PNG
) -> tuple[str, list[bytes]]:
    """The text, with a placeholder where each image stands, and the images in that order. Raises `ObjectMissing`."""
    images: list[bytes] = []
    texts: list[str] = []
    for message in messages:
        parts = (Text(text=message.content),) if isinstance(message.content, str) else message.content
        told = ""
        for part in parts:
            if isinstance(part, Text):
                told += part.text
            elif load is None:
                told += f"[image, {part.width}x{part.height}]"
            else:
                told += PLACEHOLDER
                images.append(await _in_format(wanted, part, await load(part)))
        texts.append(told)
    return "\n".join(texts), images


async def _in_format(wanted: ImageFormat, image: Image, data: bytes) -> bytes:
    if image.media_type == wanted.mime:
        return unstrippable(data)
    try:
        return await anyio.to_thread.run_sync(wanted.converted, data)
    except (OSError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ObjectMissing(f"image {image.object[:12]} cannot be read: {error}") from error


async def picture_of(image: Any, wanted: ImageFormat = PNG) -> Picture:
    """A Pillow image as a file of that format."""
    data = await anyio.to_thread.run_sync(wanted.encoded, image)
    return Picture(data=data, media_type=wanted.mime, width=image.width, height=image.height)
