"""Images of your own environment classes: given with `Start` and `Step` as the class has them, placed where ``<image>`` stands.

Above it are the session and its exchange, which know images as references alone; below it one environment of a class.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import structlog

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Environment, Start, Step, Verdict
from fleetbus_workers.environment.failure_location import locate_method
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, encode_image_file, insert_images
from fleetbus_workers.environment.validation import InvalidReturn, check_images, validate_return

S = TypeVar("S", Start, Step)
PLACEHOLDER = "<image>"

log = structlog.get_logger(__name__)


class ImageStoringFactory:
    """Makes environments of ``make`` that may show images. Without ``store_image`` a word stands for each, and a warning says
    so."""

    def __init__(self, make: Callable[[], Environment], store_image: StoreImage | None) -> None:
        self._make = make
        self._store_image = store_image
        self._has_warned = False

    def __call__(self) -> Environment:
        return ImageStoringEnvironment(self._make(), self)

    async def store_images(self, observed: S, call: str, environment: Environment) -> S:
        """The same with its images in its messages. Raises `InvalidReturn`, located in ``call``, for what is no image."""
        check_images(observed, call, environment)
        if not len(observed.images):
            return observed
        if self._store_image is None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "environment.images is off; replacing images by a placeholder",
                reason="a word stands for each image: turn environment.images on",
            )
        try:
            pictures = [await anyio.to_thread.run_sync(encode_image_file, image) for image in observed.images]
        except ValueError as error:
            raise InvalidReturn(f"{type(observed).__name__}.images: {error}", locate_method(environment, call)) from None
        return msgspec.structs.replace(
            observed, messages=await place_images(observed.messages, pictures, self._store_image), images=()
        )


class ImageStoringEnvironment:
    """One episode; calls are passed on unchanged."""

    def __init__(self, inner: Environment, factory: ImageStoringFactory) -> None:
        self.replayable = inner.replayable
        self._inner = inner
        self._factory = factory

    @property
    def implementation(self) -> object:
        """The user's object: what a failure is located in."""
        return getattr(self._inner, "implementation", self._inner)

    async def open(self, task: Task) -> None:
        await self._inner.open(task)

    async def reset(self) -> Start:
        start = validate_return(Start, await self._inner.reset(), "reset", self._inner)
        return await self._factory.store_images(start, "reset", self._inner)

    async def step(self, action: Action) -> Step:
        step = validate_return(Step, await self._inner.step(action), "step", self._inner)
        return await self._factory.store_images(step, "step", self._inner)

    async def state(self) -> dict[str, Any]:
        return await self._inner.state()

    async def verify(self) -> Verdict:
        return await self._inner.verify()

    async def close(self) -> None:
        await self._inner.close()


async def place_images(
    messages: Sequence[ChatMessage], pictures: Sequence[EncodedImage], store_image: StoreImage | None
) -> tuple[ChatMessage, ...]:
    """``messages`` with the pictures at their placeholders, in order; the last message has those that are left."""
    messages = messages or (ChatMessage(role="user", content=""),)
    placed, rest = [], list(pictures)
    for number, message in enumerate(messages):
        if not isinstance(message.content, str):
            placed.append(message)
            continue
        count = len(rest) if number == len(messages) - 1 else min(message.content.count(PLACEHOLDER), len(rest))
        mine, rest = rest[:count], rest[count:]
        content = await insert_images(message.content, mine, store_image, PLACEHOLDER)
        placed.append(msgspec.structs.replace(message, content=content))
    return tuple(placed)
