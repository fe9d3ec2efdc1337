"""Weights that are no weights, and stores that fail in ways of their own: the version is rejected, and no worker ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import anyio
import anyio.to_thread
import msgspec
import pytest
import torch

from fleetbus_schemas import PolicyPublished, TensorEntry
from fleetbus_workers.weights import fetch, store
from fleetbus_workers.weights.delta import apply_delta, write_delta
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WeightsRejected, read_weights, save_tensors, write_weights
from fleetbus_workers.weights.store import FsspecStore

LISTED = (TensorEntry(name="w", shape=(4,), dtype="F32", sha256="0" * 64),)


def published(uri: str) -> PolicyPublished:
    return PolicyPublished(policy="p", version=1, lineage="l1", step=1, uri=uri, manifest=LISTED, size_bytes=1)


@pytest.mark.parametrize("name", ["v1.safetensors", "v1.delta"])
async def test_a_pipe_in_the_place_of_weights_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
    with pytest.raises(WeightsRejected, match="not a regular file"):
        read_weights(tmp_path / name, LISTED)
    for file in (tmp_path / name, tmp_path / f"link-{name}"):
        with pytest.raises(WeightsRejected, match="not a regular file"):
            await WeightsFetcher(tmp_path / "copies", None).fetch_local(published(file.as_uri()))


async def test_a_disk_that_hangs_keeps_no_worker_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came_back, ended = Event(), Event()

    def hang(_: Path) -> None:
        came_back.wait(10)
        ended.set()

    monkeypatch.setattr(fetch, "expect_file", hang)
    try:
        with anyio.move_on_after(0.1):
            await WeightsFetcher(tmp_path / "copies", None).fetch_local(published((tmp_path / "v1.safetensors").as_uri()))
        assert not ended.is_set()
    finally:
        came_back.set()
        ended.wait(10)


async def test_a_disk_that_hangs_rejects_the_version_and_is_asked_once_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that went on waiting took no newer version, and let all episodes wait that were asked for after this one."""
    file, came_back = tmp_path / "v1.safetensors", Event()
    answered: Queue[Path] = Queue()
    file.touch()

    def hang(path: Path) -> None:
        came_back.wait(10)
        answered.put(path)

    monkeypatch.setattr(fetch, "expect_file", hang)
    monkeypatch.setattr(fetch, "LOOK_SECONDS", 0.1)
    fetcher = WeightsFetcher(tmp_path / "copies", None)
    try:
        with anyio.fail_after(5):
            for _ in range(3):
                with pytest.raises(WeightsRejected, match="does not answer"):
                    await fetcher.fetch_local(published(file.as_uri()))
    finally:
        came_back.set()
    assert await anyio.to_thread.run_sync(answered.get, True, 10) == file
    assert answered.empty()
    await anyio.to_thread.run_sync(fetcher._asked[file].wait, 10)
    assert (await fetcher.fetch_local(published(file.as_uri()))).uri == file.as_uri()


def test_a_device_in_the_place_of_weights_is_not_read() -> None:
    with pytest.raises(WeightsRejected, match="not a regular file"):
        read_weights("/dev/zero", LISTED)


@pytest.mark.parametrize(("kind", "size"), [("F8_E4M3", 4), ("F4", 2)])
def test_numbers_that_cannot_be_checked_are_rejected(kind: str, size: int, tmp_path: Path) -> None:
    content, file = b"\x7f" * size, tmp_path / "v1.safetensors"
    header = json.dumps({"w": {"dtype": kind, "shape": [4], "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content)
    entry = TensorEntry(name="w", shape=(4,), dtype=kind, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(WeightsRejected, match=kind):
        read_weights(file, (entry,))


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file of this process may be larger: to who writes it, that is a disk without room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_version_that_finds_no_room_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """One that callers wait for or report; the error of the library's own would end them."""
    base, new = tmp_path / "v0.safetensors", tmp_path / "v1.safetensors"
    write_weights(base, {"w": torch.zeros(5000)})
    write_weights(new, {"w": torch.ones(5000)})
    delta, whole = tmp_path / "v1.delta", tmp_path / "copy.safetensors"
    with files_limited_to(4096), pytest.raises(OSError) as refused:
        write_delta(delta, base=base, new=new, base_uri="v0")
    assert refused.value.errno == errno.EFBIG
    write_delta(delta, base=base, new=new, base_uri="v0")
    with files_limited_to(4096), pytest.raises(OSError) as refused:
        apply_delta(delta, base=base, file=whole)
    assert refused.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        save_tensors({"w": torch.ones(1)}, tmp_path / "absent" / "v2.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0.safetensors", "v1.delta", "v1.safetensors"]


@pytest.fixture
def failing() -> Iterator[str]:
    """The URL of a web server that answers 503 to everything."""

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_store_that_fails_for_a_while_rejects_the_version_alone(failing: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(WeightsRejected, match="503"):
        await WeightsFetcher(tmp_path, None).fetch_local(published(f"{failing}/l1-v000001.safetensors"))


BYTES = 8
PAUSE_SECONDS = 0.1


@pytest.fixture
def slow() -> Iterator[tuple[str, Event]]:
    """The URL of a web server that sends ``BYTES`` bytes one after another, and below ``/silent/`` nothing after half of them
    until the event is set."""
    ended = Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(BYTES))
            self.end_headers()
            for number in range(BYTES):
                ended.wait(60 if self.path.startswith("/silent/") and number == BYTES // 2 else PAUSE_SECONDS)
                with suppress(OSError):
                    self.wfile.write(b"w")

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    HTTPFileSystem = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem
    HTTPFileSystem.clear_instance_cache()  # their sessions keep the limits that they were made with
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", ended
        finally:
            ended.set()
            server.shutdown()
            thread.join()
    HTTPFileSystem.clear_instance_cache()


async def test_a_web_server_that_falls_silent_rejects_the_version(
    slow: tuple[str, Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SILENCE_SECONDS", 0.5)
    with anyio.fail_after(10), pytest.raises(WeightsRejected, match="l1-v000001"):
        await WeightsFetcher(tmp_path, None).fetch_local(published(f"{slow[0]}/silent/l1-v000001.safetensors"))
    assert not [path async for path in anyio.Path(tmp_path).iterdir()]


async def test_weights_that_take_longer_than_aiohttps_own_limit_arrive(
    slow: tuple[str, Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes: large weights on a slow line never came."""
    client = pytest.importorskip("aiohttp.client")
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", client.ClientTimeout(total=BYTES * PAUSE_SECONDS / 2))
    local = await WeightsFetcher(tmp_path, None).fetch_local(published(f"{slow[0]}/l1-v000001.safetensors"))
    assert await anyio.Path(local.uri.removeprefix("file://")).read_bytes() == b"w" * BYTES


async def test_a_web_server_is_asked_with_the_key_of_fsspecs_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are where a key or a proxy is named; limits of time of fleetbus's own took their place."""
    pytest.importorskip("aiohttp")
    asked: Queue[str | None] = Queue()

    class Keyed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.put(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    fsspec_config = pytest.importorskip("fsspec.config")
    monkeypatch.setitem(fsspec_config.conf, "http", {"client_kwargs": {"headers": {"Authorization": "Bearer key"}}})
    with ThreadingHTTPServer(("127.0.0.1", 0), Keyed) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            await WeightsFetcher(tmp_path, None).fetch_local(published(f"http://127.0.0.1:{server.server_port}/v1.safetensors"))
        finally:
            server.shutdown()
            thread.join()
    assert asked.get_nowait() == "Bearer key"


async def test_a_web_server_that_sends_without_end_rejects_the_version_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(fetch, "MAX_HEADER_BYTES", 1 << 20)
    ended = Event()

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not ended.is_set():
                    self.wfile.write(bytes(1 << 20))

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with anyio.fail_after(10), pytest.raises(WeightsRejected, match="larger than"):
                await WeightsFetcher(tmp_path, None).fetch_local(
                    published(f"http://127.0.0.1:{server.server_port}/v1.safetensors")
                )
        finally:
            ended.set()
            server.shutdown()
            thread.join()
    assert not [path async for path in anyio.Path(tmp_path).iterdir()]


@pytest.mark.parametrize("shape", [(10**4299,) * 700, (-(10**4299), 0), (10**18,) * 100])
async def test_a_manifest_of_tensors_that_cannot_be_holds_no_worker_up(shape: tuple[int, ...], tmp_path: Path) -> None:
    """The product of so long numbers took twenty seconds, in which a worker neither renewed its leases nor could be drained."""
    (file := tmp_path / "v1.safetensors").touch()
    version = msgspec.structs.replace(published(file.as_uri()), manifest=(msgspec.structs.replace(LISTED[0], shape=shape),))
    with anyio.fail_after(5):
        assert (await WeightsFetcher(tmp_path / "copies", None).fetch_local(version)).uri == file.as_uri()


async def test_what_a_store_raises_of_its_own_is_an_error_that_a_learner_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = FsspecStore("memory://weights")

    def fail(*_: object) -> None:
        raise RuntimeError("slow down")

    monkeypatch.setattr(weights._files, "put_file", fail)
    monkeypatch.setattr(weights._files, "exists", fail)
    with pytest.raises(OSError, match="slow down"):
        await weights.put(tmp_path / "v1.safetensors")
    with pytest.raises(OSError, match="slow down"):
        await weights.remove(tmp_path / "v1.safetensors")
