"""Images on their way to a client: read from where the environment put them, in the wanted format. Codecs run in threads."""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio.to_thread
from PIL import Image as Pillow

from fleetbus.bus.objects import ObjectMissing, ObjectStore, get_content
from fleetbus_schemas import ChatMessage, Image
from fleetbus_schemas.chat import Text
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage
from fleetbus_workers.gateway.image_format import ImageFormat, protect_last_byte

LoadImage = Callable[[Image], Awaitable[bytes]]
"""The bytes of a referenced image; raises `ObjectMissing` when they are gone."""

PLACEHOLDER = "<image>"
PNG = ImageFormat()
MAX_STORED_BYTES = 256 << 20


class InMemoryImageStore:
    """Images of a service that has everything in one process; the oldest make room for new ones."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    async def store_image(self, picture: EncodedImage) -> Image:
        name = hashlib.sha256(picture.data).hexdigest()
        if name not in self._stored:
            self._stored[name] = picture.data
            self._bytes += len(picture.data)
        self._stored.move_to_end(name)
        while self._bytes > MAX_STORED_BYTES and len(self._stored) > 1:
            self._bytes -= len(self._stored.popitem(last=False)[1])
        return Image(object=name, media_type=picture.media_type, width=picture.width, height=picture.height)

    def before(self, store: StoreImage) -> StoreImage:
        """``store``, whose newest images are kept here as well: who shows them in this process need not read them back."""

        async def store_both(picture: EncodedImage) -> Image:
            stored = await store(picture)
            await self.store_image(picture)
            return stored

        return store_both

    def load_before(self, load: LoadImage) -> LoadImage:
        """``load``, asked only for images that are not here."""

        async def load_either(image: Image) -> bytes:
            found = self._stored.get(image.object)
            return await load(image) if found is None else found

        return load_either

    async def load(self, image: Image) -> bytes:
        if image.object not in self._stored:
            raise ObjectMissing(f"image {image.object[:12]} made room for newer ones")
        return self._stored[image.object]


def build_image_loader(objects: ObjectStore) -> LoadImage:
    """Images of a run's object bucket."""

    async def load(image: Image) -> bytes:
        return await get_content(objects, image.object)

    return load


async def render_messages(
    messages: Sequence[ChatMessage], load: LoadImage | None, target_format: ImageFormat = PNG
) -> tuple[str, list[bytes]]:
    """The text, with a placeholder where each image stands, and the images in that order. Raises `ObjectMissing`."""
    images: list[bytes] = []
    texts: list[str] = []
    for message in messages:
        parts = (Text(text=message.content),) if isinstance(message.content, str) else message.content
        text = ""
        for part in parts:
            if isinstance(part, Text):
                text += part.text
            elif load is None:
                text += f"[image, {part.width}x{part.height}]"
            else:
                text += PLACEHOLDER
                images.append(await _convert_format(target_format, part, await load(part)))
        texts.append(text)
    return "\n".join(texts), images


async def _convert_format(target_format: ImageFormat, image: Image, data: bytes) -> bytes:
    if image.media_type == target_format.mime:
        return protect_last_byte(data)
    try:
        return await anyio.to_thread.run_sync(target_format.convert, data)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ObjectMissing(f"image {image.object[:12]} cannot be read: {error}") from error


async def encode_image_file(image: Any, target_format: ImageFormat = PNG) -> EncodedImage:
    """A Pillow image as a file of that format."""
    data = await anyio.to_thread.run_sync(target_format.encode, image)
    return EncodedImage(data=data, media_type=target_format.mime, width=image.width, height=image.height)
