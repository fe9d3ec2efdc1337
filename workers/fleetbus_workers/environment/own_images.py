"""Images of a class of one's own: given with `Start` and `Step` as the class has them, placed where ``<image>`` stands.

Above it are the session and its exchange, which know images as references alone; below it one environment of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import structlog

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Environment, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, encode_image_file, insert_images

S = TypeVar("S", Start, Step)
PLACEHOLDER = "<image>"

log = structlog.get_logger(__name__)


class Showing:
    """Makes environments of ``make`` that may show images. Without ``keep`` a word stands for each, and a warning says so."""

    def __init__(self, make: Callable[[], Environment], keep: StoreImage | None) -> None:
        self._make = make
        self._keep = keep
        self._has_warned = False

    def __call__(self) -> Environment:
        return ShowingEnvironment(self._make(), self)

    async def shown(self, observed: S) -> S:
        """The same with its images in its messages."""
        if not len(observed.images):
            return observed
        if self._keep is None and not self._has_warned:
            self._has_warned = True
            log.warning("images_not_shown", reason="a word stands for each image: turn environment.images on")
        pictures = [await anyio.to_thread.run_sync(encode_image_file, image) for image in observed.images]
        return msgspec.structs.replace(observed, messages=await placed(observed.messages, pictures, self._keep), images=())


class ShowingEnvironment:
    """One episode; calls go on as they are."""

    def __init__(self, inner: Environment, showing: Showing) -> None:
        self.replayable = inner.replayable
        self._inner = inner
        self._showing = showing

    async def open(self, task: Task) -> None:
        await self._inner.open(task)

    async def reset(self) -> Start:
        return await self._showing.shown(await self._inner.reset())

    async def step(self, action: Action) -> Step:
        return await self._showing.shown(await self._inner.step(action))

    async def state(self) -> dict[str, Any]:
        return await self._inner.state()

    async def verify(self) -> Verdict:
        return await self._inner.verify()

    async def close(self) -> None:
        await self._inner.close()


async def placed(
    messages: Sequence[ChatMessage], pictures: Sequence[EncodedImage], keep: StoreImage | None
) -> tuple[ChatMessage, ...]:
    """``messages`` with the pictures at their placeholders, in order; the last message has those that are left."""
    messages = messages or (ChatMessage(role="user", content=""),)
    told, rest = [], list(pictures)
    for number, message in enumerate(messages):
        if not isinstance(message.content, str):
            told.append(message)
            continue
        count = len(rest) if number == len(messages) - 1 else min(message.content.count(PLACEHOLDER), len(rest))
        mine, rest = rest[:count], rest[count:]
        content = await insert_images(message.content, mine, keep, PLACEHOLDER)
        told.append(msgspec.structs.replace(message, content=content))
    return tuple(told)
