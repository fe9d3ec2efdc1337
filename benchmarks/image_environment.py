"""A Gymnasium environment that shows another image at every step, for `gateway.py`: a gradient, and the number of the step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

ID = "fleetbus/Painted-v0"


def build_image(size: int, number: int) -> Any:
    """``size`` by ``size`` by 3 bytes; no two numbers below 65,536 look the same."""
    ramp = np.linspace(0, 255, size, dtype=np.uint8)
    image = np.stack([np.tile(ramp, (size, 1)), np.tile(ramp[:, None], (1, size)), np.full((size, size), 128, np.uint8)], -1)
    image[: size // 8, : size // 8] = (number % 256, number // 256 % 256, 0)
    return image


class ImageEnvironment(gymnasium.Env[Any, Any]):
    """Nothing but ``go on``; it never ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, size: int = 64, render_mode: str | None = None) -> None:
        self.action_space = gymnasium.spaces.Discrete(1)
        self.observation_space = gymnasium.spaces.Discrete(1 << 30)
        self.render_mode = render_mode
        self._size = size
        self._number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(1 << 15))  # clients with the same seed see the same images
        return self._number, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._number += 1
        return self._number, 0.0, False, False, {}

    def render(self) -> Any:
        return build_image(self._size, self._number)


if ID not in gymnasium.registry:
    gymnasium.register(id=ID, entry_point="benchmarks.image_environment:ImageEnvironment", disable_env_checker=True)
