"""The images of an episode on their way to the engine: fetched, processed, put in the place of their tokens.

Above is `ObservationHandler`; below are the run's object bucket and the processor of the model's folder. The ids that an image
becomes are
decided here, once, and recorded; the learner and every later turn see the same.
"""

from collections.abc import Sequence

import anyio
import anyio.to_thread

from fleetbus_schemas import ChatMessage, ShownImage
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.processing import ImageProcessor, ProcessedImage, expand_image_tokens
from fleetbus_workers.images.reader import ImageReader
from fleetbus_workers.inference.base import PromptDelta

MAX_CONCURRENT_IMAGES = 8
"""Images in the processor, or in line for it."""


class ImagePrompts:
    """`ImageSource` of one bucket for one model."""

    def __init__(self, processor: ImageProcessor, reader: ImageReader) -> None:
        self._processor = processor
        self._reader = reader
        self._room = anyio.CapacityLimiter(MAX_CONCURRENT_IMAGES)

    async def expand(self, ids: list[int], messages: Sequence[ChatMessage]) -> PromptDelta:
        """See `ImageSource.expand`."""
        names = [image.object for message in messages for image in message.images]
        if not names:
            return PromptDelta(ids=ids)
        seen = [await self._process_image(name) for name in names]
        result, shown = expand_image_tokens(ids, self._processor.image_token_id, seen)
        return PromptDelta(ids=result, images=tuple(shown))

    async def load_images(self, images: Sequence[ShownImage]) -> tuple[PlacedImage, ...]:
        """See `ImageSource.load_images`."""
        return tuple(
            [
                PlacedImage(object=each.object, start=each.start, stop=each.stop, data=await self._reader.read(each.object))
                for each in images
            ]
        )

    async def _process_image(self, name: str) -> ProcessedImage:
        if (known := self._processor.look_up(name)) is not None:
            return known
        data = await self._reader.read(name)
        return await anyio.to_thread.run_sync(self._processor.see, name, data, limiter=self._room)
