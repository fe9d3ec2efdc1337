"""Images of a run's object bucket by their hash: fetched with a deadline, checked, kept in a bounded memory.

Above are the inference worker and the learner; below is the object store of the bus. What a message calls an image is not
trusted: a name that is no hash is never made a file name, and bytes of another hash are no image.
"""

from collections import OrderedDict

import anyio

from fleetbus.bus.base import LogBus
from fleetbus.bus.objects import InvalidObjectName, ObjectMissing, ObjectReader, check_content_hash, get_content
from fleetbus.errors import BusError
from fleetbus_workers.weights.store import get_every_object

FETCH_SECONDS = 30.0
MAX_CONCURRENT_FETCHES = 8
CACHE_BYTES = 256 << 20


class ImageFailed(Exception):
    """This image can never be shown to a model; the message is one line. ``error_class`` is how it is recorded."""

    error_class = "image_failed"


class ImageMissing(ImageFailed):
    """The bucket has no such image."""

    error_class = "image_missing"


class ImageUnreadable(ImageFailed):
    """The bytes are no image that the model's processor takes."""

    error_class = "image_unreadable"


class ImageMismatch(ImageFailed):
    """The image does not become the tokens that stand for it: two processors differ."""

    error_class = "image_mismatch"


class ImageNotFetched(Exception):
    """The image could not be fetched now; another worker or a later try may succeed. One line."""


class ImageReader:
    """Images of one bucket; least recently used ones are dropped beyond ``cache_bytes``. None: a bus without objects."""

    def __init__(
        self, objects: ObjectReader | None, *, cache_bytes: int = CACHE_BYTES, fetch_seconds: float = FETCH_SECONDS
    ) -> None:
        self._objects = objects
        self._cache_bytes = cache_bytes
        self._fetch_seconds = fetch_seconds
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._fetching = anyio.CapacityLimiter(MAX_CONCURRENT_FETCHES)

    async def read(self, name: str) -> bytes:
        """The bytes whose SHA-256 (hex) is ``name``. Raises `ImageMissing` or `ImageUnreadable`."""
        if (cached := self._get_cached(name)) is not None:
            return cached
        try:
            check_content_hash(name)
        except InvalidObjectName as invalid:
            raise ImageMissing(f"the name of an image: {invalid}") from invalid
        if self._objects is None:
            raise ImageMissing(f"image {name}: this bus stores no objects")
        async with self._fetching:
            if (cached := self._get_cached(name)) is not None:
                return cached
            data = await self._fetch(self._objects, name)
        self._cache_image(name, data)
        return data

    def _get_cached(self, name: str) -> bytes | None:
        if name in self._cache:
            self._cache.move_to_end(name)
        return self._cache.get(name)

    def _cache_image(self, name: str, data: bytes) -> None:
        self._bytes += len(data) - len(self._cache.get(name, b""))
        self._cache[name] = data
        while self._bytes > self._cache_bytes and self._cache:
            self._bytes -= len(self._cache.popitem(last=False)[1])

    async def _fetch(self, objects: ObjectReader, name: str) -> bytes:
        try:
            with anyio.fail_after(self._fetch_seconds):
                return await get_content(objects, name)
        except ObjectMissing as missing:
            raise ImageMissing(f"image {name}: {missing}") from missing
        except TimeoutError as timeout:
            raise ImageNotFetched(f"image {name}: not fetched within {self._fetch_seconds:g} s") from timeout
        except (BusError, OSError) as error:
            raise ImageNotFetched(f"image {name}: {' '.join(str(error).split())}") from error


def image_reader(bus: LogBus, run: str) -> ImageReader:
    """The reader of a run's images."""
    return ImageReader(get_every_object(bus, run))
