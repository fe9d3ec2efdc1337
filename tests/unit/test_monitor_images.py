"""The page serves images by their hash with the type of their bytes, and nothing that is no image, too large or forbidden."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from fleetbus.bus.objects import ObjectStore
from fleetbus.errors import BusError, NotPermitted
from tests.support.bucket import Bucket

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.routing import Route

from fleetbus_workers.observe.monitor.images import ObservedImages

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
MARKUP = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


def name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def fetch(objects: ObjectStore | None, *names: str) -> list[httpx.Response]:
    app = Starlette(routes=[Route("/api/images/{object}", ObservedImages(objects).image)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://page") as client:
        return [await client.get(f"/api/images/{each}") for each in names]


async def test_an_image_has_the_type_of_its_bytes() -> None:
    jpeg, webp = b"\xff\xd8\xff\xe0rest", b"RIFF\x00\x00\x00\x00WEBPrest"
    bucket = Bucket({name(each): each for each in (PNG, jpeg, webp)})
    answers = await fetch(bucket, *bucket.objects)
    assert [answer.headers["content-type"] for answer in answers] == ["image/png", "image/jpeg", "image/webp"]
    assert answers[0].content == PNG


async def test_what_is_no_image_or_of_another_name_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.observe.monitor.images.MAX_IMAGE_BYTES", 100)
    large = PNG + bytes(100)
    bucket = Bucket({name(MARKUP): MARKUP, name(large): large, name(b"gone"): PNG, "manifest.json": PNG})
    answers = await fetch(bucket, name(MARKUP), name(large), name(b"gone"), name(b"never"), "manifest.json", "..%2f..%2fetc")
    assert [answer.status_code for answer in answers] == [415, 413, 404, 404, 400, 404]
    assert all(answer.headers["content-type"].startswith("text/plain") for answer in answers)
    assert not any(b"script" in answer.content for answer in answers)


async def test_a_key_that_may_not_read_the_bucket_asks_once() -> None:
    bucket = Bucket()
    bucket.failure = NotPermitted("the server does not let monitor publish")
    app = ObservedImages(bucket)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=Starlette(routes=[Route("/{object}", app.image)])), base_url="http://page"
    ) as client:
        assert [(await client.get(f"/{name(PNG)}")).status_code for _ in range(3)] == [403] * 3
    assert bucket.gets == 1


async def test_a_bucket_that_does_not_answer_is_said_and_a_bus_without_one_too() -> None:
    bucket = Bucket()
    bucket.failure = BusError("no answer")
    assert [answer.status_code for answer in await fetch(bucket, name(PNG))] == [503]
    assert [answer.status_code for answer in await fetch(None, name(PNG))] == [404]
