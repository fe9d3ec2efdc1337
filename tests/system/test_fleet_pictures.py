"""Screenshots of a Fleet instance in the object bucket of a real server, named by their hash in the observation."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.memory_objects import MemoryObjectStore
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import Action, Image, Task
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.images.store import build_image_store, build_run_image_store
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.weights.store import get_image_store
from tests.support.fleet_platform.instance import png
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import serve_application
from tests.support.servers import connect, run_server
from tests.support.tool_calls import NoGrader

TASK = Task(key="click", env="shop", prompt="Click.", modality="computer_use")
CONFIGURATION = Configuration(run=RunSettings(name="pictures"))


async def test_what_an_observation_names_can_be_read_by_whoever_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    with anyio.fail_after(50):
        async with (
            run_server(tmp_path / "nats") as server,
            connect(server.url, run="pictures") as bus,
            serve_application(FleetPlatform().app) as platform,
        ):
            factory = build_environment_factory(
                f"fleet:{platform.url}",
                verifier=NoGrader(),
                configuration=CONFIGURATION,
                store_image=build_run_image_store(bus, CONFIGURATION),
            )
            async with factory.run():
                environment = factory()
                await environment.open(TASK)
                start = await environment.reset()
                call = {"name": "computer", "arguments": {"action": "wait"}}
                step = await environment.step(
                    Action(episode_id="e", attempt=1, turn=0, text=f"<tool_call>{json.dumps(call)}</tool_call>")
                )
                await environment.close()
            objects = get_image_store(bus, "pictures")
            assert objects is not None
            for number, message in enumerate((start.messages[1], step.messages[0]), 1):
                (image,) = (part for part in message.content if isinstance(part, Image))
                await objects.get(image.object, tmp_path / "read.png")
                assert await anyio.Path(tmp_path / "read.png").read_bytes() == png(number)
                assert (image.width, image.height) == (4, 3)


async def test_an_image_is_stored_once_and_a_failure_to_store_it_is_no_reference() -> None:
    stored: list[str] = []

    class Objects(MemoryObjectStore):
        fails = False

        async def put_bytes(self, name: str, content: bytes) -> None:
            if self.fails:
                raise OSError("no room")
            stored.append(name)
            assert content == b"picture"

    store_image = build_image_store(objects := Objects({}))
    assert await store_image(EncodedImage(data=b"picture")) == await store_image(EncodedImage(data=b"picture"))
    assert len(stored) == 1
    objects.fails = True
    with pytest.raises(OSError, match="no room"):
        await store_image(EncodedImage(data=b"another"))
