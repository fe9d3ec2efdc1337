"""The format in which a gateway sends images: by name, as Pillow has them. Encoding is for threads.

An image that stands in the wanted format already keeps its bytes. One that is encoded keeps its mode where the format has it,
so that lossless formats keep every pixel, and transparency; else it becomes RGB.
"""

import io
from typing import Any

import msgspec
from PIL import Image as Pillow
from PIL import features

from fleetbus_workers.environment.images.png import encode_png
from fleetbus_workers.images.image_formats import IMAGE_FORMATS

_STRIPPED = b" \t\n\r\x0b\x0c-"


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: PNG, JPEG, WEBP, ...; ``mime``: how parts are labelled; ``quality`` 1 to 100 for JPEG and WEBP (which is
    lossless at 100), 0: Pillow's default."""

    name: str = "PNG"
    mime: str = "image/png"
    quality: int = 0

    def encode(self, image: Any) -> bytes:
        """A Pillow image as a file of this format."""
        try:
            return self._save(image)
        except (OSError, ValueError, KeyError):  # a mode that the format does not have
            return self._save(image.convert("RGB"))

    def convert(self, data: bytes) -> bytes:
        """An image file of any format in this one. Raises `OSError` if it cannot be read."""
        with Pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            return data if opened.format == self.name and not self.quality else self.encode(opened)

    def _save(self, image: Any) -> bytes:
        if self.name == "PNG":
            return protect_last_byte(encode_png(image))
        options: dict[str, object] = {}
        if self.quality:
            options["quality"] = self.quality
            if self.name == "WEBP" and self.quality == 100:
                options["lossless"] = options["exact"] = True
        buffer = io.BytesIO()
        image.save(buffer, self.name, **options)
        return protect_last_byte(buffer.getvalue())


def parse_image_format(name: str = "PNG", mime: str = "", quality: int = 0) -> ImageFormat:
    """A checked format; ``mime`` empty: the format's own. Raises `ValueError` with what is wrong."""
    Pillow.init()
    known = sorted(each for each in Pillow.SAVE if Pillow.MIME.get(each, "").startswith("image/"))
    name = {"JPG": "JPEG"}.get(name.upper(), name.upper())
    if name not in known or (name == "WEBP" and not features.check("webp")):
        raise ValueError(f"image format {name!r} is none of: {', '.join(known)}")
    if mime and not mime.startswith("image/"):
        raise ValueError(f"image type {mime!r} must begin with image/: clients skip other parts")
    if not 0 <= quality <= 100:
        raise ValueError(f"image quality must be between 1 and 100, or 0 for the default, not {quality}")
    return ImageFormat(name=name, mime=mime or Pillow.MIME[name], quality=quality)


def protect_last_byte(data: bytes) -> bytes:
    """A file whose last byte survives the decoder of the protocol's own client, which strips white space and dashes; what
    follows the image is never read."""
    return data + b"\0" if data[-1:] in (bytes([each]) for each in _STRIPPED) else data
