"""The environment behind our gateways in `gateway_peers.py`: as those of the original servers, a text or another image at every
step."""

from __future__ import annotations

from typing import Any

from PIL import Image

from benchmarks.image_environment import build_image
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict


class SteppingEnvironment:
    """``task.config["size"]``: pixels a side, 0 for text. It never ends."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._size = int(task.config.get("size", 0))
        self._number = task.seed or 0

    async def reset(self) -> Start:
        return Start(**self._seen())

    async def step(self, action: Action) -> Step:
        self._number += 1
        return Step(**self._seen())

    def _seen(self) -> dict[str, Any]:
        if not self._size:
            return {"messages": (ChatMessage(role="user", content=f"turn {self._number}"),)}
        shown = (Image.fromarray(build_image(self._size, self._number)),)
        return {"messages": (ChatMessage(role="user", content="<image>"),), "images": shown}

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        return Verdict(reward=0.0)

    async def close(self) -> None:
        return
