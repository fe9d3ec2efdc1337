"""Classes of one's own that show images in every form there is; coroutines in `Shows`, ordinary functions in `ShowsPlainly`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image as Pillow

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict

SIZE = (8, 6)


def painted(seed: int) -> Pillow.Image:
    """Noise that is another for every seed, RGB."""
    values = np.random.default_rng(seed).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    return Pillow.fromarray(values)


def file_of(image: Pillow.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def forms(seed: int) -> dict[str, Any]:
    """One picture in all forms; each is to be seen with the pixels of `painted`."""
    image = painted(seed)
    array = np.asarray(image)
    return {
        "pillow": image,
        "rgba": image.convert("RGBA"),
        "png": file_of(image, "PNG"),
        "bmp": file_of(image, "BMP"),
        "array": array,
        "floats": array / 255.0,
        "with alpha": np.dstack([array, np.full(array.shape[:2], 255, dtype=np.uint8)]),
    }


class ShowsPlainly:
    """Shows the form that the task's config names, at the reset and with every step."""

    replayable = True

    def open(self, task: Task) -> None:
        self._form = task.config.get("form", "pillow")
        self._count = 0

    def reset(self) -> Start:
        content = "before <image> after <image>"
        shown = [forms(0)[self._form], forms(1)[self._form]]
        return Start(messages=(ChatMessage(role="user", content=content),), images=shown)

    def step(self, action: Action) -> Step:
        self._count += 1
        shown = (forms(self._count)[self._form],)
        message = ChatMessage(role="user", content=f"after {action.text}")
        return Step(messages=(message,), images=shown, reward=1.0, terminated=self._count == 2)

    def state(self) -> dict[str, Any]:
        return {}

    def verify(self) -> Verdict:
        return Verdict(reward=float(self._count))

    def close(self) -> None:
        return


class Shows:
    """The same in coroutines."""

    replayable = True

    def __init__(self) -> None:
        self._plain = ShowsPlainly()

    async def open(self, task: Task) -> None:
        self._plain.open(task)

    async def reset(self) -> Start:
        return self._plain.reset()

    async def step(self, action: Action) -> Step:
        return self._plain.step(action)

    async def state(self) -> dict[str, Any]:
        return self._plain.state()

    async def verify(self) -> Verdict:
        return self._plain.verify()

    async def close(self) -> None:
        self._plain.close()
