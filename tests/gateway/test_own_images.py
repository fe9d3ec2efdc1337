"""Images of one's own classes - Pillow images, bytes, arrays - arrive with every pixel: in messages, and through gateways."""

from __future__ import annotations

import base64
import io
from collections import deque
from typing import Any

import anyio
import numpy as np
import pytest
import structlog.testing
from PIL import Image as Pillow

from fleetbus_schemas import Action, ChatMessage, Task, Text
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.remote_gym.wire import decode_response
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, encode_image_file
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.environment.validation import InvalidReturn
from fleetbus_workers.gateway.images import InMemoryImageStore
from tests.support.openenv_gateway import gateway
from tests.support.paying import gym_gateway, paying_configuration
from tests.support.showing import forms, painted
from tests.support.small_deployment import small_deployment
from tests.support.tool_calls import NoGrader

SPECS = ("tests.support.showing:Shows", "tests.support.showing:ShowsPlainly", "pool:tests.support.showing:ShowsPlainly")
FORMS = tuple(forms(0))


def factory(spec: str, images: InMemoryImageStore | None) -> EnvironmentFactory:
    return build_environment_factory(spec, verifier=NoGrader(), store_image=images.store_image if images else None)


def action(text: str) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text)


def pixels(data: bytes) -> bytes:
    with Pillow.open(io.BytesIO(data)) as image:
        return image.convert("RGB").tobytes()


async def parts_of(message: ChatMessage, images: InMemoryImageStore) -> list[Any]:
    assert not isinstance(message.content, str)
    return [part.text if isinstance(part, Text) else pixels(await images.load(part)) for part in message.content]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_image_is_shown_where_it_belongs(spec: str, form: str) -> None:
    images = InMemoryImageStore()
    made = factory(spec, images)
    with anyio.fail_after(50):
        async with made.run():
            environment = made()
            await environment.open(Task(key="t", config={"form": form}))
            (message,) = (await environment.reset()).messages
            zero, one = painted(0).tobytes(), painted(1).tobytes()
            assert await parts_of(message, images) == ["before ", zero, " after ", one]
            step = await environment.step(action("x"))
            assert await parts_of(step.messages[0], images) == ["after x", one]
            assert (step.reward, step.images) == (1.0, ())
            await environment.close()


async def test_without_a_bucket_a_word_stands_for_each_image_and_the_log_says_why() -> None:
    made = factory(SPECS[0], None)
    async with made.run():
        environment = made()
        await environment.open(Task(key="t"))
        with structlog.testing.capture_logs() as logged:
            assert (await environment.reset()).messages[0].content == "before [image, 8x6] after [image, 8x6]"
            assert (await environment.step(action("x"))).messages[0].content == "after x[image, 8x6]"
    assert ["environment.images" in str(entry) for entry in logged] == [True]


async def test_through_the_remote_gym_gateway() -> None:
    images = InMemoryImageStore()
    made = factory(SPECS[1], images)
    async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet, load=images.load) as wire, made.run():
        fleet.environment("e1", make=made)
        response = await wire.post("/connect", {"env_config": {}, "seed": 1})
        begun = decode_response(response.headers["content-type"], response.content)
        assert begun.fields["obs"] == "before <image> after <image>"
        assert [*map(pixels, begun.images)] == [painted(0).tobytes(), painted(1).tobytes()]
        session = begun.fields["session_id"]
        for number in (1, 2):
            step = {"session_id": session, "method": "step", "params": {"action_str": "x"}}
            response = await wire.post("/call", step)
            seen = decode_response(response.headers["content-type"], response.content)
            assert (seen.fields["obs"], seen.fields["done"]) == ("after x<image>", number == 2)
            assert [*map(pixels, seen.images)] == [painted(number).tobytes()]
        await wire.call(session, "close")


async def test_through_the_openenv_gateway() -> None:
    images = InMemoryImageStore()
    made = factory(SPECS[1], images)
    async with made.run(), gateway(make=made, load=images.load) as here, here.socket() as socket:
        await socket.ask("reset")
        told = (await socket.ask("step", text="x"))["data"]["observation"]
        (content,) = (message["content"] for message in told["messages"])
        assert told["text"] == "after x<image>"
        assert content[0] == {"type": "text", "text": "after x"}
        assert pixels(base64.b64decode(content[1]["image_url"]["url"].partition(",")[2])) == painted(1).tobytes()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"nonsense", "cannot be read"),
        ("a path", "is no image"),
        (np.zeros((2, 2, 7), dtype=np.uint8), "shape"),
        (np.full((2, 2), 3.5), "uint8, or floats from 0 to 1"),
        (np.zeros((0, 2), dtype=np.uint8), "is no image"),
    ],
)
def test_what_is_no_image_says_what_is_wrong(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode_image_file(value)


class ShowsOne:
    """Returns a value as the images of its start."""

    replayable = True
    shown: Any = None

    def open(self, task: Task) -> None: ...

    def reset(self) -> Start:
        return Start(messages=(ChatMessage(role="user", content="see"),), images=self.shown)

    def step(self, action: Action) -> Step:
        return Step(terminated=True)

    def state(self) -> dict[str, Any]:
        return {}

    def verify(self) -> Verdict:
        return Verdict(reward=0.0)

    def close(self) -> None: ...


class ShowsOneArray(ShowsOne):
    shown = np.zeros((4, 4, 3), dtype=np.uint8)


class ShowsOneOfPillow(ShowsOne):
    shown = painted(0)


@pytest.mark.parametrize("name", ["ShowsOneArray", "ShowsOneOfPillow"])
async def test_one_image_in_the_place_of_several_is_refused_in_processes_too(name: str) -> None:
    made = factory(f"pool:{__name__}:{name}", None)
    with anyio.fail_after(50):
        async with made.run():
            environment = made()
            await environment.open(Task(key="t"))
            with pytest.raises(EnvironmentFailed, match=r"Start\.images must be a tuple of images") as caught:
                await environment.reset()
            await environment.close()
    assert "test_own_images.py" in caught.value.location


@pytest.mark.parametrize("kind", [list, deque, np.stack])
async def test_every_kind_of_sequence_may_hold_the_images(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShowsOne, "shown", kind([np.zeros((4, 4, 3), dtype=np.uint8)] * 2))
    environment = factory(f"{__name__}:ShowsOne", None)()
    await environment.open(Task(key="t"))
    assert (await environment.reset()).messages[0].content == "see[image, 4x4][image, 4x4]"


@pytest.mark.parametrize("one", [painted(0), np.zeros((4, 4, 3), dtype=np.uint8), b"bytes", "a path", None])
async def test_one_image_in_the_place_of_several_is_refused_and_located(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShowsOne, "shown", one)
    environment = factory(f"{__name__}:ShowsOne", None)()
    await environment.open(Task(key="t"))
    with pytest.raises(InvalidReturn, match=r"Start\.images must be a tuple of images") as caught:
        await environment.reset()
    assert "test_own_images.py" in caught.value.location


def test_a_picture_and_an_rgb_file_keep_their_bytes() -> None:
    data = forms(3)["png"]
    assert encode_image_file(data).data == data
    picture = EncodedImage(data=b"anything")
    assert encode_image_file(picture) is picture
