"""Images through both gateways: every pixel of lossless formats, whatever the mode, as the protocol's own client reads them."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import threading
from typing import Any

import anyio
import httpx
import pytest
from PIL import Image as Pillow

from fleetbus_schemas import Action, ChatMessage, Image, Task, Text
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.gateway.gym_service import BaseGymHandler, GymService, build_gym_service
from fleetbus_workers.gateway.image_format import ImageFormat, parse_image_format
from tests.support.gym_service import Handler, Wire, running, serve_gym
from tests.support.openenv_gateway import gateway


def noise(mode: str, size: tuple[int, int] = (7, 5), *, seed: int = 0) -> Pillow.Image:
    values = random.Random(seed)
    if mode == "F":
        return noise("L", size, seed=seed).convert("F")
    if mode == "P":
        return noise("RGB", size, seed=seed).quantize(16)
    width = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2}[mode]
    if mode == "1":
        return noise("L", size, seed=seed).convert("1")
    return Pillow.frombytes(mode, size, values.randbytes(size[0] * size[1] * width))


class Gallery(BaseGymHandler):
    """Shows the given images at the reset."""

    def __init__(self, *images: Pillow.Image) -> None:
        super().__init__()
        self.images = list(images)

    async def create_env(self, env_config: dict[str, Any]) -> Any:
        return Shown(self.images)


class Shown:
    def __init__(self, images: list[Pillow.Image]) -> None:
        self._images = images

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Look."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"obs_str": "<image>" * len(self._images), "multi_modal_input": {"<image>": self._images}}, {}

    async def close(self) -> None:
        return


async def seen(wire: Wire) -> tuple[list[bytes], list[str]]:
    """The files of one reset and their types, as the protocol's own client finds them: it splits at the boundary, and strips
    white space and dashes off each part."""
    response = await wire.post("/connect", {"env_config": {}, "seed": 1})
    assert response.status_code == 200, response.text
    boundary = response.headers["content-type"].partition("boundary=")[2].strip('"')
    files, types = [], []
    for chunk in response.content.split(f"--{boundary}".encode()):
        part = chunk.strip().removesuffix(b"--").strip()
        head, _, body = part.partition(b"\r\n\r\n")
        if b"Content-Type: image/" in head:
            files.append(body)
            types.append(head.partition(b"Content-Type: ")[2].decode())
    return files, types


def as_the_client_has_it(image: Pillow.Image) -> bytes:
    return image.convert("RGBA").tobytes()


@pytest.mark.parametrize(("name", "quality"), [("PNG", 0), ("BMP", 0), ("TIFF", 0), ("PPM", 0), ("WEBP", 100)])
async def test_lossless_formats_keep_every_pixel_of_every_image(name: str, quality: int) -> None:
    images = [noise("RGB", (5, 4), seed=seed) for seed in range(80)]
    async with serve_gym(Gallery(*images), image_format=name, image_quality=quality) as wire:  # type: ignore[arg-type]
        files, types = await seen(wire)
    assert set(types) == {Pillow.MIME[name]}
    assert [as_the_client_has_it(Pillow.open(io.BytesIO(file))) for file in files] == [*map(as_the_client_has_it, images)]


async def test_png_keeps_the_mode_of_an_image_and_its_transparency() -> None:
    modes = ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"]
    images = [noise(mode) for mode in modes]
    async with serve_gym(Gallery(*images)) as wire:  # type: ignore[arg-type]
        files, _ = await seen(wire)
    opened = [Pillow.open(io.BytesIO(file)) for file in files]
    assert [image.mode for image in opened] == modes
    assert [*map(as_the_client_has_it, opened)] == [*map(as_the_client_has_it, images)]


@pytest.mark.parametrize(("name", "mode"), [("PNG", "F"), ("PNG", "CMYK"), ("JPEG", "RGBA"), ("JPEG", "P"), ("WEBP", "I;16")])
async def test_a_mode_that_the_format_does_not_have_becomes_rgb_and_is_no_error(name: str, mode: str) -> None:
    async with serve_gym(Gallery(noise(mode)), image_format=name) as wire:  # type: ignore[arg-type]
        ((file,), _) = await seen(wire)
    assert Pillow.open(io.BytesIO(file)).size == (7, 5)


async def test_format_label_and_quality_are_the_caller_s_choice() -> None:
    image = Pillow.radial_gradient("L").convert("RGB")
    sizes = {}
    for quality in (20, 90):
        options = {"image_format": "jpeg", "image_mime": "image/jpg", "image_quality": quality}
        async with serve_gym(Gallery(image), **options) as wire:  # type: ignore[arg-type]
            ((file,), (label,)) = await seen(wire)
        assert (label, Pillow.open(io.BytesIO(file)).format) == ("image/jpg", "JPEG")
        sizes[quality] = len(file)
    assert sizes[20] < sizes[90]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_format": "nonsense"}, "'NONSENSE' is none of: .*JPEG.*PNG"),
        ({"image_mime": "text/plain"}, "must begin with image/"),
        ({"image_quality": 101}, "between 1 and 100"),
    ],
)
def test_a_format_that_cannot_be_is_named_when_the_service_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GymService(Handler(), **options)


async def test_the_first_way_of_making_a_service_takes_the_format_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_IMAGE_FORMAT", "JPEG")
    async with running(build_gym_service(Gallery(noise("RGB")))) as wire:
        assert (await seen(wire))[1] == ["image/jpeg"]


async def test_others_are_answered_while_an_image_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, go_on = threading.Event(), threading.Event()
    encoded = ImageFormat.encode

    def slowly(self: ImageFormat, image: Any) -> bytes:
        encoding.set()
        assert go_on.wait(40)
        return encoded(self, image)

    monkeypatch.setattr(ImageFormat, "encode", slowly)
    async with serve_gym(Gallery(noise("RGB"))) as wire, anyio.create_task_group() as group:  # type: ignore[arg-type]
        group.start_soon(seen, wire)
        await anyio.to_thread.run_sync(encoding.wait, 40)
        assert (await wire.get("/health")).json()["ok"] is True
        go_on.set()


def test_what_is_in_the_wanted_format_already_keeps_its_bytes() -> None:
    buffer = io.BytesIO()
    noise("RGB").save(buffer, "JPEG", quality=31)
    assert parse_image_format("JPEG").convert(buffer.getvalue()) == buffer.getvalue()
    assert parse_image_format("PNG").convert(buffer.getvalue()).startswith(b"\x89PNG")


class Bucket:
    """Images by their hash, as the run's object bucket has them."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def keep(self, data: bytes, media_type: str) -> Image:
        name = hashlib.sha256(data).hexdigest()
        self.kept[name] = data
        return Image(object=name, media_type=media_type, width=7, height=5)

    async def load(self, image: Image) -> bytes:
        await anyio.lowlevel.checkpoint()
        return self.kept[image.object]


class Painter:
    """Every observation is a text around an image: PNG at the reset, WEBP after each step."""

    replayable = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def open(self, task: Task) -> None:
        await anyio.lowlevel.checkpoint()

    def _message(self, name: str) -> ChatMessage:
        buffer = io.BytesIO()
        noise("RGB").save(buffer, name, **({"lossless": True, "exact": True} if name == "WEBP" else {}))
        image = self._bucket.keep(buffer.getvalue(), f"image/{name.lower()}")
        return ChatMessage(role="user", content=(Text(text="before "), image, Text(text=" after")))

    async def reset(self) -> Start:
        return Start(messages=(ChatMessage(role="system", content="Look."), self._message("PNG")))

    async def step(self, action: Action) -> Step:
        return Step(messages=(self._message("WEBP"),), reward=0.5)

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        return Verdict(reward=1.0)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()


def pixels_of(part: dict[str, Any]) -> tuple[str, bytes]:
    kind, _, coded = part["image_url"]["url"].partition(";base64,")
    return kind, Pillow.open(io.BytesIO(base64.b64decode(coded))).convert("RGB").tobytes()


async def test_images_come_through_the_openenv_gateway_pixel_for_pixel_by_socket_http_and_tool() -> None:
    bucket = Bucket()
    expected = noise("RGB").tobytes()
    async with gateway(make=lambda: Painter(bucket), load=bucket.load) as here, here.socket() as socket:
        told = (await socket.ask("reset"))["data"]["observation"]
        assert told["text"] == "before <image> after"
        assert told["messages"][0] == {"role": "system", "content": "Look."}
        before, image, after = told["messages"][1]["content"]
        assert (before, after) == ({"type": "text", "text": "before "}, {"type": "text", "text": " after"})
        assert pixels_of(image) == ("data:image/png", expected)
        stepped = (await socket.ask("step", text="x"))["data"]["observation"]
        assert pixels_of(stepped["messages"][0]["content"][1]) == ("data:image/webp", expected)
        async with httpx.AsyncClient() as client:
            told = (await client.post(f"{here.url}/reset", json={})).json()["observation"]
        assert pixels_of(told["messages"][1]["content"][1]) == ("data:image/png", expected)


async def test_without_a_bucket_a_word_stands_for_an_image() -> None:
    async with gateway(make=lambda: Painter(Bucket())) as here, here.socket() as socket:
        assert (await socket.ask("reset"))["data"]["observation"]["text"] == "before [image, 7x5] after"
