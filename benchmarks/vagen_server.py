"""VAGEN's own service beside the gateway, for a Python that has fastapi, Pillow and NumPy: ``python vagen_server.py PORT``.

Its environment answers at once, with a text, or with an image that is another one at every step and whose size the
configuration names. The service is out of the checkout that ``VAGEN_CHECKOUT`` names.
"""

import sys

import numpy as np
from client_load import import_vagen
from PIL import Image


def build_image(size: int, number: int) -> Image.Image:
    """As `image_environment.build_image`."""
    ramp = np.linspace(0, 255, size, dtype=np.uint8)
    image = np.stack([np.tile(ramp, (size, 1)), np.tile(ramp[:, None], (1, size)), np.full((size, size), 128, np.uint8)], -1)
    image[: size // 8, : size // 8] = (number % 256, number // 256 % 256, 0)
    return Image.fromarray(image)


class Painting:
    def __init__(self, config: dict) -> None:
        self._size = int(config.get("size", 0))
        self._number = 0

    def _seen(self) -> dict:
        if not self._size:
            return {"obs_str": f"turn {self._number}"}
        return {"obs_str": "<image>", "multi_modal_input": {"<image>": [build_image(self._size, self._number)]}}

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


def make_app():
    remote = import_vagen()

    class Painter(remote.BaseGymHandler):
        async def create_env(self, env_config: dict) -> Painting:
            return Painting(env_config)

    return remote.GymService(Painter()).build()


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
