"""An image with its place in a token history: what engines and trainers are handed."""

import msgspec


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, stop)`` of a history stand for the image ``object``, the SHA-256 (hex) of its bytes ``data``."""

    object: str
    start: int
    stop: int
    data: bytes
