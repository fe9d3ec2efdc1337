"""The environment behind our gateways in `gateway_peers.py`: as those of the original servers, a text or another image at every
step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.image_environment import build_image
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict


@cache
def draw_scene(size: int) -> Any:
    """Textured blocks, which compress as rendered pictures do; a gradient compresses a hundred times better."""
    random = np.random.default_rng(0)
    blocks = np.kron(random.integers(0, 255, (32, 32, 3), dtype=np.uint8), np.ones((size // 32, size // 32, 1), np.uint8))
    return (blocks + random.integers(0, 4, (size, size, 1), dtype=np.uint8)).astype(np.uint8)


def build_scene(size: int, number: int) -> Any:
    return np.roll(draw_scene(size), 7 * number, axis=1)


class SteppingEnvironment:
    """``task.config``: ``size``, pixels a side, 0 for text; ``scene``: textured blocks instead of a gradient. It never ends."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._size = int(task.config.get("size", 0))
        self._build = build_scene if task.config.get("scene") else build_image
        self._number = task.seed or 0

    async def reset(self) -> Start:
        return Start(**self._seen())

    async def step(self, action: Action) -> Step:
        self._number += 1
        return Step(**self._seen())

    def _seen(self) -> dict[str, Any]:
        if not self._size:
            return {"messages": (ChatMessage(role="user", content=f"turn {self._number}"),)}
        shown = (Image.fromarray(self._build(self._size, self._number)),)
        return {"messages": (ChatMessage(role="user", content="<image>"),), "images": shown}

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        return Verdict(reward=0.0)

    async def close(self) -> None:
        return
