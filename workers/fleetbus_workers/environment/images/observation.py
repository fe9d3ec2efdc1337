"""Images in observations: stored in the run's object bucket, named in the message by their hash, in their place in the text.

Shared by the environments that show images. Their factory passes the function that stores an image; without one, a
placeholder text replaces each image, so that a run without images still shows where they would be.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fleetbus_schemas import Image, Text
from fleetbus_workers.environment.images.png import encode_png, encode_rgb_png
from fleetbus_workers.images.image_formats import IMAGE_FORMATS

if TYPE_CHECKING:
    from PIL import Image as Pillow

MAX_PIXELS = 1 << 24
"""Decoded, so many take some 200 MB, and many are decoded at once; a screen of 5120 x 2880 has fewer."""


class EncodedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a policy may see it: its bytes in the file format ``media_type``, RGB."""

    data: bytes
    media_type: str = "image/png"
    width: int = 0
    height: int = 0


def encode_image_file(value: Any) -> EncodedImage:
    """A picture from what environments have: a Pillow image, the bytes of an image file, or an array (NumPy, torch) of height x
    width, or height x width x 1, 3 or 4 - uint8, or floats from 0 to 1. Blocking. Raises `ValueError` for what is none.

    A file that is RGB in PNG or JPEG keeps its bytes, all else becomes an RGB PNG.
    """
    if isinstance(value, EncodedImage):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _picture_of_file(bytes(value))
    if hasattr(value, "convert") and hasattr(value, "save"):
        _check_size(value.width, value.height)
        return _picture_of_image(value)
    return _picture_of_array(value)


def _picture_of_image(image: Pillow.Image) -> EncodedImage:
    image = image if image.mode == "RGB" else image.convert("RGB")
    return EncodedImage(data=encode_png(image), width=image.width, height=image.height)


def _picture_of_file(data: bytes) -> EncodedImage:
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            _check_size(image.width, image.height)
            kept = image.mode == "RGB" and image.format in ("PNG", "JPEG")
            media_type = f"image/{(image.format or '').lower()}" if kept else "image/png"
            encoded = data if kept else encode_png(image.convert("RGB"))
            return EncodedImage(data=encoded, media_type=media_type, width=image.width, height=image.height)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error


def _picture_of_array(value: object) -> EncodedImage:
    import numpy as np

    array = np.asarray(value)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        given = f"{type(value).__name__} of shape {array.shape}" if array.ndim else type(value).__name__
        raise ValueError(f"{given} is no image: give one of Pillow, the bytes of a file, or an array of height x width x 3")
    height, width = array.shape[:2]
    _check_size(width, height)
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"an image of {array.dtype} is not supported: give uint8, or floats from 0 to 1")
    if array.shape[2:] == (3,):
        return EncodedImage(data=encode_rgb_png(array), width=width, height=height)
    from PIL import Image as Pillow

    return _picture_of_image(Pillow.fromarray(array))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"an image of {width}x{height} pixels is too large")


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
