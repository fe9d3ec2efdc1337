"""VAGEN's own service beside the gateway, for a Python that has fastapi, Pillow and NumPy: ``python vagen_server.py PORT``.

Its environment answers at once, with a text, or with an image that is another one at every step: a gradient, or a
scene of textured blocks; the configuration names its size. The service is out of the checkout that ``VAGEN_CHECKOUT`` names.
"""

import sys
from functools import cache
from typing import Any

import numpy as np
from client_load import import_vagen
from PIL import Image


def build_image(size: int, number: int) -> Image.Image:
    """As `image_environment.build_image`."""
    ramp = np.linspace(0, 255, size, dtype=np.uint8)
    image = np.stack([np.tile(ramp, (size, 1)), np.tile(ramp[:, None], (1, size)), np.full((size, size), 128, np.uint8)], -1)
    image[: size // 8, : size // 8] = (number % 256, number // 256 % 256, 0)
    return Image.fromarray(image)


@cache
def draw_scene(size: int) -> np.ndarray:
    """As `stepping_environment.draw_scene`."""
    random = np.random.default_rng(0)
    blocks = np.kron(random.integers(0, 255, (32, 32, 3), dtype=np.uint8), np.ones((size // 32, size // 32, 1), np.uint8))
    return (blocks + random.integers(0, 4, (size, size, 1), dtype=np.uint8)).astype(np.uint8)


def build_scene(size: int, number: int) -> Image.Image:
    return Image.fromarray(np.roll(draw_scene(size), 7 * number, axis=1))


class Painting:
    def __init__(self, config: dict) -> None:
        self._size = int(config.get("size", 0))
        self._build = build_scene if config.get("scene") else build_image
        self._number = 0

    def _seen(self) -> dict:
        if not self._size:
            return {"obs_str": f"turn {self._number}"}
        return {"obs_str": "<image>", "multi_modal_input": {"<image>": [self._build(self._size, self._number)]}}

    async def system_prompt(self) -> dict:
        return {"obs_str": "Look."}

    async def reset(self, seed: int) -> tuple:
        self._number = seed
        return self._seen(), {}

    async def step(self, action: str) -> tuple:
        self._number += 1
        return self._seen(), 0.0, False, {}

    async def close(self) -> None:
        return


def make_app() -> Any:
    remote = import_vagen()

    class Painter(remote.BaseGymHandler):  # type: ignore[misc, name-defined]
        async def create_env(self, env_config: dict) -> Painting:
            return Painting(env_config)

    return remote.GymService(Painter()).build()


if __name__ == "__main__":
    import uvicorn

    # connections outlast the turns of the other servers
    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=60)
