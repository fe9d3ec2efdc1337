"""The real OpenEnv server beside the gateway, for the Python that has `openenv`: ``python openenv_image_server.py PORT``.

It answers at once, with a text, or with a text and a PNG in base64 whose size the reset names. Not a part of fleetbus.
"""

import base64
import io
import os
import sys

os.environ.setdefault("ENABLE_WEB_INTERFACE", "false")


def make_app():
    import numpy as np
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from PIL import Image

    class Told(Action):
        text: str

    class Seen(Observation):
        text: str = ""
        image: str = ""

    class Painted(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._size = self._number = 0

        def reset(self, seed=None, episode_id=None, size=0):
            self._size, self._number = size, seed or 0
            return self._seen()

        def step(self, action, timeout_s=None):
            self._number += 1
            return self._seen()

        def _seen(self):
            if not self._size:
                return Seen(text=f"turn {self._number}", reward=0.0)
            ramp = np.linspace(0, 255, self._size, dtype=np.uint8)
            flat = np.full((self._size, self._size), 128, np.uint8)
            image = np.stack([np.tile(ramp, (self._size, 1)), np.tile(ramp[:, None], (1, self._size)), flat], -1)
            image[: self._size // 8, : self._size // 8] = (self._number % 256, self._number // 256 % 256, 0)
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "PNG")
            return Seen(text="<image>", image=base64.b64encode(buffer.getvalue()).decode(), reward=0.0)

        @property
        def state(self):
            return State(step_count=self._number)

    return create_fastapi_app(Painted, Told, Seen, max_concurrent_envs=256)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
