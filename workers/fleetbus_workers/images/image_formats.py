"""File formats of images of others that are read: what models are shown, and no format whose reader is a program of its own
(PostScript is given to Ghostscript by Pillow) or a rarely used decoder.
"""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""By Pillow's names."""

_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
)


def find_media_type(data: bytes) -> str:
    """The media type of an image file by how it begins, under any name; empty for none of `IMAGE_FORMATS`."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for beginning, kind in _BEGINNINGS if data.startswith(beginning)), "")
