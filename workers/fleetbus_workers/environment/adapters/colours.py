"""Questions about small pictures, made here: which colour is the square, and where is it? For models that see; needs Pillow.

Each turn shows one picture of 32x32 pixels, a square of one colour in a corner of a grey ground, with some noise, and asks the
task's prompt. The answer is the first word of the reply: the colour or, by the task's config ``ask``: ``place``, the corner.
The reward is the share of right answers. Everything follows from the task's seed.
"""

from __future__ import annotations

import io
import random
import re
from typing import Any

import anyio
import anyio.to_thread
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, StoreImage, insert_images

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
PLACES = {"north": (0, 0), "east": (1, 0), "south": (1, 1), "west": (0, 1)}
SIZE, SIDE = 32, 20
"""Pixels along the picture and along the square."""

TURNS = 2
NOISE = 24
"""Most that a channel of a pixel differs from its plain value."""

_PLACEHOLDER = "<picture>"
_WORD = re.compile(r"[a-z]+")


def build(context: AdapterContext) -> Factory:
    """Environments of as many turns as the spec says, else of `TURNS`. Raises `UserError`."""
    turns = context.rest
    if turns and not (turns.isdecimal() and int(turns) > 0):
        raise UserError(f"environment {context.spec!r}: the number of turns must be 1 or more, as in colours:3")
    count = int(turns or TURNS)
    return Factory(lambda: ColoursEnvironment(count, store_image=context.store_image))


class ColoursEnvironment:
    """One episode of ``turns`` pictures."""

    replayable = True

    def __init__(self, turns: int = TURNS, *, store_image: StoreImage | None = None) -> None:
        self._turns = turns
        self._store_image = store_image
        self._right = 0
        self._played = 0

    async def open(self, task: Task) -> None:
        seed = find_seed(task)
        self._random = random.Random(seed)
        self._asks_place = task.config.get("ask") == "place"
        self._prompt = task.prompt or ("Where is it?" if self._asks_place else "Which colour?")
        self._turns = int(task.config.get("turns", self._turns))
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        return Start(messages=(await self._build_question(),))

    async def step(self, action: Action) -> Step:
        word = _WORD.search(action.text.lower())
        right = word is not None and word[0] == self._answer
        self._right += right
        self._played += 1
        if self._played == self._turns:
            return Step(reward=right / self._turns, terminated=True)
        return Step(messages=(await self._build_question(),), reward=right / self._turns)

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"played": self._played, "right": self._right, "answer": self._answer}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=self._right / self._turns)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _build_question(self) -> ChatMessage:
        colour, place = self._random.choice(list(COLOURS)), self._random.choice(list(PLACES))
        self._answer = place if self._asks_place else colour
        data = await anyio.to_thread.run_sync(draw, colour, place, self._random.getrandbits(32))
        shown = [EncodedImage(data=data, width=SIZE, height=SIZE)]
        content = await insert_images(f"{_PLACEHOLDER} {self._prompt}", shown, self._store_image, _PLACEHOLDER)
        return ChatMessage(role="user", content=content)


def draw(colour: str, place: str, seed: int) -> bytes:
    """The picture as PNG: the same arguments give the same bytes."""
    noise = random.Random(seed)
    column, row = PLACES[place]
    image = Pillow.new("RGB", (SIZE, SIZE), (128, 128, 128))
    left, top = column * (SIZE - SIDE), row * (SIZE - SIDE)
    image.paste(COLOURS[colour], (left, top, left + SIDE, top + SIDE))
    levels = [min(255, max(0, level + noise.randint(-NOISE, NOISE))) for level in image.tobytes()]
    buffer = io.BytesIO()
    Pillow.frombytes("RGB", image.size, bytes(levels)).save(buffer, "PNG")
    return buffer.getvalue()
