"""An image that is gone by the time that it is sent: an episode that cannot be trained on, told in each protocol's words."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbus.bus.objects import ObjectMissing
from fleetbus_schemas import Action, ChatMessage, Image, Task, Text
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.gateway import images
from tests.support.gym_service import Handler, serve_gym
from tests.support.openenv_gateway import gateway

Pillow = pytest.importorskip("PIL.Image")


class Gallery(Handler):
    async def create_env(self, env_config: dict[str, Any]) -> Any:
        return Painted()


class Painted:
    """Shows two pictures at every turn."""

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Look."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        pictures = [Pillow.new("RGB", (4, 4), (level, 0, 0)) for level in (10, 20)]
        return {"obs_str": "<image><image>", "multi_modal_input": {"<image>": pictures}}, {}

    async def close(self) -> None:
        return


async def test_a_gym_client_is_told_that_the_episode_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_STORED_BYTES", 1)  # each picture takes the room of the one before
    async with serve_gym(Gallery()) as wire:
        told = await wire.connect()
        assert told["obs"] == "Environment Error"
        assert told["info"]["training_usable"] is False and "made room" in told["info"]["error"]
        assert await wire.call(told["session_id"], "close") == {"closed": True}


class Shown:
    """Refers to an image that nobody has."""

    replayable = True

    async def open(self, task: Task) -> None: ...

    async def reset(self) -> Start:
        content = (Text(text="Look: "), Image(object="0" * 64, media_type="image/png", width=4, height=4))
        return Start(messages=(ChatMessage(role="user", content=content),))

    async def step(self, action: Action) -> Step:
        return Step(terminated=True)

    async def state(self) -> dict[str, Any]:
        return {"there": True}

    async def verify(self) -> Verdict:
        return Verdict(reward=1.0)

    async def close(self) -> None: ...


async def test_an_openenv_client_gets_an_error_and_its_socket_goes_on() -> None:
    async def load(image: Image) -> bytes:
        raise ObjectMissing(f"object {image.object} is not in bucket b")

    async with gateway(make=Shown, load=load) as here, here.socket() as socket:
        told = await socket.ask("reset", seed=1)
        assert (told["type"], told["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert "is not in bucket" in told["data"]["message"]
        assert (await socket.ask("state"))["data"]["there"] is True
