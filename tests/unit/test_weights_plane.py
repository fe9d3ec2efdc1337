"""Versions of the weights on their way: differences, local copies, stores. The bus's object store is in `tests/system`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fleetbus.bus.memory_objects import MemoryObjectStore
from fleetbus.bus.objects import ObjectMissing
from fleetbus.core.audit.addresses import Addresses
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished, TensorEntry
from fleetbus_workers.weights.delta import apply_delta, read_base_uri, write_delta, write_smaller
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WeightsRejected, read_weights, write_weights
from fleetbus_workers.weights.store import FolderStore, FsspecStore, open_store

Tensors = dict[str, torch.Tensor]


def before() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return {
        "few": torch.randn(100, 20, generator=draw),
        "none": torch.randn(50, generator=draw),
        "all": torch.randn(30, 3, generator=draw),
        "half": torch.randn(64, generator=draw).to(torch.bfloat16),
    }


def after() -> Tensors:
    tensors = {name: tensor.clone() for name, tensor in before().items()}
    tensors["few"][7, 3] = -0.0
    tensors["few"][99, 19] += 1
    tensors["all"] += 1
    tensors["half"][5] = 2.0
    return tensors


def written(folder: Path, name: str, tensors: Tensors) -> tuple[Path, tuple[TensorEntry, ...]]:
    file = folder / name
    return file, write_weights(file, tensors)


def published(uri: str, manifest: tuple[TensorEntry, ...], version: int = 1) -> PolicyPublished:
    return PolicyPublished(policy="p", version=version, lineage="l1", step=1, uri=uri, manifest=manifest, size_bytes=1)


class Shelf:
    """An object store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []

    async def put(self, name: str, file: Path) -> None:
        shutil.copyfile(file, self.folder / name)

    async def get(self, name: str, file: Path) -> None:
        self.asked.append(name)
        if not (self.folder / name).exists():
            raise ObjectMissing(f"object {name} is not in bucket b")
        shutil.copyfile(self.folder / name, file)

    async def put_bytes(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        self.asked.append(name)
        return (self.folder / name).read_bytes()

    async def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


def test_base_and_difference_are_the_new_version_bit_for_bit(tmp_path: Path) -> None:
    base, _ = written(tmp_path, "v0.safetensors", before())
    new, manifest = written(tmp_path, "v1.safetensors", after())

    size = write_delta(tmp_path / "v1.delta", base=base, new=new, base_uri="file:///base")
    apply_delta(tmp_path / "v1.delta", base=base, file=tmp_path / "again.safetensors")

    assert read_base_uri(tmp_path / "v1.delta") == "file:///base"
    assert read_base_uri(new) is None
    assert size < new.stat().st_size / 3
    read = read_weights(tmp_path / "again.safetensors", manifest)  # hashes and all
    assert all(torch.equal(read[name], tensor) for name, tensor in after().items())
    assert set(load_file(tmp_path / "v1.delta")) == {
        "places:few", "values:few", "whole:all", "places:half", "values:half"
    }  # fmt: skip


def test_a_difference_that_is_no_smaller_is_not_used(tmp_path: Path) -> None:
    base, _ = written(tmp_path, "v0.safetensors", before())
    new, _ = written(tmp_path, "v1.safetensors", {name: tensor + 1 for name, tensor in before().items()})

    assert write_smaller(new, base=base, base_uri="x") == new
    assert not list(tmp_path.glob("*.delta"))


def test_a_difference_to_something_else_is_rejected(tmp_path: Path) -> None:
    base, _ = written(tmp_path, "v0.safetensors", before())
    new, _ = written(tmp_path, "v1.safetensors", after())
    other, _ = written(tmp_path, "other.safetensors", {"few": torch.zeros(3)})
    write_delta(tmp_path / "v1.delta", base=base, new=new, base_uri="x")

    with pytest.raises(WeightsRejected, match="does not fit its base"):
        apply_delta(tmp_path / "v1.delta", base=other, file=tmp_path / "again")
    assert not (tmp_path / "again").exists()


async def test_a_shared_file_is_used_where_it_lies(tmp_path: Path) -> None:
    file, manifest = written(tmp_path, "v0.safetensors", before())

    local = await WeightsFetcher(tmp_path / "copies", None).fetch_local(published(file.as_uri(), manifest))

    assert local.uri == file.as_uri()
    assert not (tmp_path / "copies").exists()


async def test_an_object_is_copied_once_and_old_copies_go(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    shelf = Shelf(tmp_path / "shelf")
    fetcher = WeightsFetcher(tmp_path / "copies", shelf)
    for version in range(4):
        file, manifest = written(tmp_path, f"v{version}.safetensors", {"w": torch.full((3,), float(version))})
        await shelf.put(file.name, file)
        for _ in range(2):
            local = await fetcher.fetch_local(published(f"nats-object://b/{file.name}", manifest, version))
            assert read_weights(local.uri, manifest)["w"].tolist() == [version] * 3

    assert shelf.asked == [f"v{version}.safetensors" for version in range(4)]
    assert len(list((tmp_path / "copies").iterdir())) == 2
    fetcher.close()
    assert not (tmp_path / "copies").exists()


async def chain(tmp_path: Path, length: int) -> tuple[Shelf, list[tuple[str, tuple[TensorEntry, ...]]]]:
    """A whole version and ``length`` differences, each to the one before, and what was published of each."""
    (tmp_path / "shelf").mkdir()
    shelf = Shelf(tmp_path / "shelf")
    tensors = before()
    base, manifest = written(tmp_path, "v0.safetensors", tensors)
    await shelf.put(base.name, base)
    entries = [(f"nats-object://b/{base.name}", manifest)]
    for number in range(1, length + 1):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["few"][number, 0] = number
        new, manifest = written(tmp_path, f"v{number}.safetensors", tensors)
        delta = write_smaller(new, base=base, base_uri=entries[-1][0])
        await shelf.put(delta.name, delta)
        entries.append((f"nats-object://b/{delta.name}", manifest))
        base = new
    return shelf, entries


async def test_a_follower_fetches_one_difference_per_version(tmp_path: Path) -> None:
    shelf, entries = await chain(tmp_path, 3)
    fetcher = WeightsFetcher(tmp_path / "copies", shelf)

    for version, (uri, manifest) in enumerate(entries):
        local = await fetcher.fetch_local(published(uri, manifest, version))
        assert read_weights(local.uri, manifest)["few"][version, 0] == pytest.approx(version) or version == 0

    assert shelf.asked == ["v0.safetensors", "v1.delta", "v2.delta", "v3.delta"]


async def test_a_newcomer_goes_back_to_the_last_whole_version(tmp_path: Path) -> None:
    shelf, entries = await chain(tmp_path, 3)
    fetcher = WeightsFetcher(tmp_path / "copies", shelf)

    local = await fetcher.fetch_local(published(*entries[-1], version=3))

    assert set(read_weights(local.uri, entries[-1][1])) == set(before())
    assert shelf.asked == ["v3.delta", "v2.delta", "v1.delta", "v0.safetensors"]


async def test_what_cannot_be_had_is_rejected_in_one_line_and_may_be_had_later(tmp_path: Path) -> None:
    shelf, entries = await chain(tmp_path, 1)
    hidden = (tmp_path / "shelf/v0.safetensors").rename(tmp_path / "hidden")
    fetcher = WeightsFetcher(tmp_path / "copies", shelf)
    with pytest.raises(WeightsRejected, match=r"v0\.safetensors is not in bucket b") as caught:
        await fetcher.fetch_local(published(*entries[-1]))
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsRejected, match="has no object store"):
        await WeightsFetcher(tmp_path / "copies", None).fetch_local(published(*entries[-1]))

    hidden.rename(tmp_path / "shelf/v0.safetensors")

    assert (await fetcher.fetch_local(published(*entries[-1]))).uri.startswith("file://")


async def test_differences_whose_base_cannot_be_had_do_not_stay_on_the_disk(tmp_path: Path) -> None:
    """Nobody would remove them once a whole version is published: each may be almost as large as the model."""
    shelf, entries = await chain(tmp_path, 3)
    (tmp_path / "shelf/v0.safetensors").unlink()

    with pytest.raises(WeightsRejected, match=r"v0\.safetensors is not in bucket b"):
        await WeightsFetcher(tmp_path / "copies", shelf).fetch_local(published(*entries[-1]))

    assert list((tmp_path / "copies").iterdir()) == []


async def test_a_copy_that_was_damaged_on_its_way_is_fetched_again_with_all_that_was_made_of_it(tmp_path: Path) -> None:
    """The base is remembered, and every version after it would be made of it."""
    shelf, entries = await chain(tmp_path, 2)
    base, fetcher = tmp_path / "shelf/v0.safetensors", WeightsFetcher(tmp_path / "copies", shelf)
    sound = base.read_bytes()
    base.write_bytes(sound[:-4] + b"    ")
    for _ in range(2):
        local = await fetcher.fetch_local(published(*entries[1]))
        with pytest.raises(WeightsRejected):
            read_weights(local.uri, entries[1][1])
    fetcher.discard_copies()
    base.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(WeightsRejected, match="does not fit its base"):
        await fetcher.fetch_local(published(*entries[1]))
    base.write_bytes(sound)
    local = await fetcher.fetch_local(published(*entries[2]))
    assert set(read_weights(local.uri, entries[2][1])) == set(before())


async def test_what_a_process_that_was_killed_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / ".half.safetensors").write_bytes(b"half")
    shelf, entries = await chain(tmp_path, 1)
    await WeightsFetcher(tmp_path / "copies", shelf).fetch_local(published(*entries[0], version=0))
    assert [file.suffix for file in (tmp_path / "copies").iterdir() if file.name.startswith(".")] == []


async def test_a_base_that_somebody_removed_from_the_disk_is_fetched_again(tmp_path: Path) -> None:
    shelf, entries = await chain(tmp_path, 2)
    fetcher = WeightsFetcher(tmp_path / "copies", shelf)
    await fetcher.fetch_local(published(*entries[1]))
    for copy in (tmp_path / "copies").iterdir():
        copy.unlink()
    with pytest.raises(WeightsRejected, match="No such file"):
        await fetcher.fetch_local(published(*entries[2]))
    local = await fetcher.fetch_local(published(*entries[2]))
    assert set(read_weights(local.uri, entries[2][1])) == set(before())


async def test_a_folder_may_be_served_under_another_name(tmp_path: Path) -> None:
    file = tmp_path / "v0.safetensors"

    assert await FolderStore().put(file) == file.as_uri()
    assert await FolderStore("http://host:8000/weights/").put(file) == "http://host:8000/weights/v0.safetensors"


async def test_whatever_fsspec_writes_is_a_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    file, manifest = written(tmp_path, "v0.safetensors", before())
    store = FsspecStore("memory://bucket/run")
    uri = await store.put(file)

    local = await WeightsFetcher(tmp_path / "copies", None).fetch_local(published(uri, manifest))

    assert uri == "memory://bucket/run/v0.safetensors"
    assert set(read_weights(local.uri, manifest)) == set(before())
    await store.remove(file)
    await store.remove(file)
    with pytest.raises(WeightsRejected):
        await WeightsFetcher(tmp_path / "others", None).fetch_local(published(uri, manifest))


@pytest.mark.parametrize("store", ["s4://nowhere/x", "somewhere", "nats"])
def test_a_store_that_does_not_exist_is_refused_by_name(store: str) -> None:
    bus: Any = SimpleNamespace(objects=lambda bucket: None)

    with pytest.raises(UserError, match=r"s4|weights\.store"):
        open_store(bus, store, run="r")


async def test_the_files_of_two_policies_have_names_of_their_own_in_one_bucket(tmp_path: Path) -> None:
    contents: dict[str, bytes] = {}
    bus: Any = SimpleNamespace(objects=lambda bucket: MemoryObjectStore(contents))
    addresses = Addresses()
    for policy, prefix in (("default", ""), ("solver", "solver"), ("l1", "l1")):
        file, manifest = written(tmp_path, "l1-v000000.safetensors", before())
        uri = await open_store(bus, "nats", run="r", policy=prefix).put(file)
        published = PolicyPublished(
            policy=policy, version=0, lineage="l1", step=0, uri=uri, manifest=manifest, size_bytes=file.stat().st_size
        )
        assert addresses.is_version_right(published), uri
    assert len(contents) == 3


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of ``tmp_path`` on a web server of this process."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_served_folder_is_read_over_http(tmp_path: Path, served: str) -> None:
    pytest.importorskip("aiohttp")
    file, manifest = written(tmp_path, "v0.safetensors", before())
    uri = await FolderStore(served).put(file)
    fetcher = WeightsFetcher(tmp_path / "copies", None)

    local = await fetcher.fetch_local(published(uri, manifest))

    assert set(read_weights(local.uri, manifest)) == set(before())
    with pytest.raises(WeightsRejected, match="absent"):
        await fetcher.fetch_local(published(f"{served}/absent.safetensors", manifest, 2))
