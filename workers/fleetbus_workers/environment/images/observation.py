"""Images in observations: stored in the run's object bucket, named in the message by their hash, in their place in the text.

Shared by the environments that show images. Their factory passes the function that stores an image; without one, a
placeholder text replaces each image, so that a run without images still shows where they would be.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from fleetbus_schemas import Image, Text

if TYPE_CHECKING:
    from PIL import Image as Pillow

FAST_PNG = {"compress_level": 1}
"""A fifth of the time of Pillow's own level at about the same size, for what environments show."""


class EncodedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a policy may see it: its bytes in the file format ``media_type``, RGB."""

    data: bytes
    media_type: str = "image/png"
    width: int = 0
    height: int = 0


def encode_png(image: Pillow.Image) -> bytes:
    """The image as a PNG file; blocking."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **FAST_PNG)
    return buffer.getvalue()


StoreImage = Callable[[EncodedImage], Awaitable[Image]]
"""Stores an image in the run's object bucket and gives the reference to it."""


async def insert_images(
    text: str, pictures: Sequence[EncodedImage], store_image: StoreImage | None, placeholder: str
) -> str | tuple[Text | Image, ...]:
    """``text`` with each picture where its ``placeholder`` stands; pictures without one follow the text."""
    if not pictures:
        return text
    pieces = text.split(placeholder, len(pictures))
    if store_image is None:
        described = [f"[image, {picture.width}x{picture.height}]" for picture in pictures]
        joined = "".join(piece + word for piece, word in zip(pieces, described, strict=False))
        rest = pieces[len(described) :] or described[len(pieces) :]
        return joined + " ".join(rest)
    parts: list[Text | Image] = []
    for number, picture in enumerate(pictures):
        if number < len(pieces) and pieces[number]:
            parts.append(Text(text=pieces[number]))
        image = await store_image(picture)
        parts.append(msgspec.structs.replace(image, width=image.width or picture.width, height=image.height or picture.height))
    parts += [Text(text=piece) for piece in pieces[len(pictures) :] if piece]
    return tuple(parts)
