"""Images in observations: kept in the run's object bucket, named in the message by their hash, in their place in the text.

Shared by the environments that show images. Whoever makes them gives the function that keeps an image; without one, a word
stands for each image, so that a run without images still says where they would be.
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


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a policy may see it: its bytes in the file format ``media_type``, RGB."""

    data: bytes
    media_type: str = "image/png"
    width: int = 0
    height: int = 0


def to_png(image: Pillow.Image) -> bytes:
    """The image as a PNG file; blocking."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **FAST_PNG)
    return buffer.getvalue()


KeepPicture = Callable[[Picture], Awaitable[Image]]
"""Stores an image in the run's object bucket and gives the reference to it."""


async def with_pictures(
    text: str, pictures: Sequence[Picture], keep: KeepPicture | None, placeholder: str
) -> str | tuple[Text | Image, ...]:
    """``text`` with each picture where its ``placeholder`` stands; pictures without one follow the text."""
    if not pictures:
        return text
    pieces = text.split(placeholder, len(pictures))
    if keep is None:
        described = [f"[image, {picture.width}x{picture.height}]" for picture in pictures]
        joined = "".join(piece + word for piece, word in zip(pieces, described, strict=False))
        rest = pieces[len(described) :] or described[len(pieces) :]
        return joined + " ".join(rest)
    parts: list[Text | Image] = []
    for number, picture in enumerate(pictures):
        if number < len(pieces) and pieces[number]:
            parts.append(Text(text=pieces[number]))
        image = await keep(picture)
        parts.append(msgspec.structs.replace(image, width=image.width or picture.width, height=image.height or picture.height))
    parts += [Text(text=piece) for piece in pieces[len(pictures) :] if piece]
    return tuple(parts)
