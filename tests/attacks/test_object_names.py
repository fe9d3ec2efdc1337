"""A writer of the run's bucket names objects that are paths: no reader writes a file there."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.nats import objects as nats_objects
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.objects import InvalidObjectName, ObjectMissing, ObjectTooLarge, check_object_name, get_content
from fleetbus_schemas import Image, PolicyPublished
from fleetbus_workers.gateway.images import build_image_loader
from fleetbus_workers.images.reader import ImageMissing, ImageReader
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WeightsRejected
from tests.support.backends import asyncio_alone
from tests.support.servers import connect, run_server

anyio_backend = asyncio_alone


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncGenerator[NatsBus]:
    async with run_server(tmp_path / "nats") as server, connect(server.url, run="attacked") as bus:
        assert isinstance(bus, NatsBus)
        yield bus


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that the worker's user may write."""
    path = tmp_path / "authorized_keys"
    path.write_bytes(b"the owner's")
    return path


async def put_unchecked(bus: NatsBus, name: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store an object as a client that checks nothing would."""
    with monkeypatch.context() as lax:
        lax.setattr(nats_objects, "check_object_name", lambda name: name)
        await bus.objects("fbweights_attacked").put_bytes(name, content)


async def test_no_reader_of_images_writes_a_file_that_an_image_names(
    bus: NatsBus, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(victim)
    await put_unchecked(bus, name, b"the attacker's", monkeypatch)
    objects = bus.objects("fbweights_attacked")
    with pytest.raises(ObjectMissing):
        await build_image_loader(objects)(Image(object=name))
    with pytest.raises(ImageMissing):
        await ImageReader(objects).read(name)
    assert await anyio.Path(victim).read_bytes() == b"the owner's"


async def test_no_engine_writes_a_file_that_a_version_of_the_weights_names(
    bus: NatsBus, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"")
    name = f"/../../{victim}"
    await put_unchecked(bus, name, b"the attacker's", monkeypatch)
    fetcher = WeightsFetcher(tmp_path / "copies", bus.objects("fbweights_attacked"))
    named = {"policy": "p", "version": 1, "lineage": "l1", "step": 1, "manifest": (), "size_bytes": 1}
    for published in (
        PolicyPublished(**named, uri=(tmp_path / "w.safetensors").as_uri(), manifest_object=name),  # type: ignore[arg-type]
        PolicyPublished(**named, uri=f"nats-object://fbweights_attacked/{name}"),  # type: ignore[arg-type]
    ):
        with pytest.raises(WeightsRejected):
            await fetcher.fetch_local(published)
    assert await anyio.Path(victim).read_bytes() == b"the owner's"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "a\n", "x" * 201, "ä", "a b", "C:x"]
)
async def test_a_store_takes_and_gives_no_object_whose_name_could_be_a_path(bus: NatsBus, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidObjectName):
        check_object_name(name)
    store = bus.objects("fbweights_attacked")
    for call in (
        store.put_bytes(name, b"x"),
        store.put(name, tmp_path / "nats"),
        store.get(name, tmp_path / "out"),
        store.get_bytes(name, max_bytes=1),
        store.remove(name),
    ):
        with pytest.raises(InvalidObjectName):
            await call


async def test_content_that_is_not_what_its_name_says_is_refused(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    name = hashlib.sha256(b"what was named").hexdigest()
    await put_unchecked(bus, name, b"something else", monkeypatch)
    with pytest.raises(ObjectMissing, match="another hash"):
        await get_content(bus.objects("fbweights_attacked"), name)


async def test_an_object_larger_than_its_reader_takes_is_refused_before_it_is_read(bus: NatsBus) -> None:
    store = bus.objects("fbweights_attacked")
    await store.put_bytes("large", bytes(300_000))
    with pytest.raises(ObjectTooLarge):
        await store.get_bytes("large", max_bytes=299_999)
    assert len(await store.get_bytes("large", max_bytes=300_000)) == 300_000
