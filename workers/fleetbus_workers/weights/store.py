"""Stores versions of the weights between learner and engines: shared files, the bus's object store, or what fsspec knows.

The learner puts a file and publishes the URI that it gets; `fleetbus_workers.weights.fetch` turns that URI into a local file
again. What arrives is checked against the manifest before an engine takes it, so that a store need not be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread

from fleetbus.bus.base import LogBus
from fleetbus.bus.objects import ObjectMissing, ObjectStore, get_content, images_bucket, weights_bucket
from fleetbus.errors import BusClosed, BusError, UserError

OBJECT_SCHEME = "nats-object"

SILENCE_SECONDS = 60.0
"""After so long without a byte a web server is given up."""


class WeightsStore(Protocol):
    """Takes files of the learner's weights folder, by absolute path."""

    async def put(self, file: Path) -> str:
        """Make a file readable for every engine and return its URI. Raises `OSError` or `BusError`."""

    async def remove(self, file: Path) -> None:
        """Forget a file that was put; the local one is the caller's."""


class FolderStore:
    """The folder itself is shared, or served as it is below ``public_url``."""

    def __init__(self, public_url: str = "") -> None:
        self._public_url = public_url.rstrip("/")

    async def put(self, file: Path) -> str:
        return f"{self._public_url}/{file.name}" if self._public_url else file.as_uri()

    async def remove(self, file: Path) -> None:
        """Nothing but the file itself."""


class BusStore:
    """The object store of the bus; nothing is shared but the server."""

    def __init__(self, objects: ObjectStore, bucket: str, prefix: str = "") -> None:
        self._objects = objects
        self._bucket = bucket
        self._prefix = prefix

    async def put(self, file: Path) -> str:
        await self._objects.put(self._prefix + file.name, file)
        return f"{OBJECT_SCHEME}://{self._bucket}/{self._prefix}{file.name}"

    async def remove(self, file: Path) -> None:
        await self._objects.remove(self._prefix + file.name)


class FsspecStore:
    """Any place that fsspec writes, as ``s3://bucket/path``; engines may read it from ``public_url`` instead."""

    def __init__(self, url: str, public_url: str = "") -> None:
        self._url = url.rstrip("/")
        self._public_url = (public_url or url).rstrip("/")
        self._files: Any = open_filesystem(self._url)

    async def put(self, file: Path) -> str:
        await anyio.to_thread.run_sync(self._upload, file)
        return f"{self._public_url}/{file.name}"

    async def remove(self, file: Path) -> None:
        await anyio.to_thread.run_sync(self._delete, file)

    def _upload(self, file: Path) -> None:
        with raise_os_error(self._url):
            self._files.makedirs(self._url, exist_ok=True)
            self._files.put_file(str(file), f"{self._url}/{file.name}")

    def _delete(self, file: Path) -> None:
        with raise_os_error(self._url):
            if self._files.exists(f"{self._url}/{file.name}"):
                self._files.rm_file(f"{self._url}/{file.name}")


def download(uri: str, file: Path, *, max_bytes: float = math.inf) -> None:
    """Copy what fsspec finds at ``uri``; blocking. Raises `OSError`, also of a web server that falls silent and of what is
    larger, or `UserError`."""

    def check(size: int | None, value: int) -> None:
        if max(size or 0, value) > max_bytes:
            raise OSError(f"{uri} is larger than {max_bytes:.0f} bytes, and no version of these tensors is")

    with raise_os_error(uri):
        options = _limit_silence() if uri.startswith(("http://", "https://")) else {}
        files = open_filesystem(uri, **options)

        from fsspec.callbacks import Callback

        files.get_file(uri, str(file), callback=Callback(hooks={"size": check}))


def _limit_silence() -> dict[str, Any]:
    """Options of each request by which a server may send as long as it likes, but not be silent: aiohttp's own limit is five
    minutes for all of a file, however large. Those of the session, as a proxy or a key, are fsspec's settings. Raises
    `UserError`."""
    try:
        from aiohttp import ClientTimeout
    except ModuleNotFoundError as error:
        raise UserError("weights over HTTP need aiohttp: pip install 'fleetbus[stores]'") from error
    return {"timeout": ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)}


@contextmanager
def raise_os_error(url: str) -> Iterator[None]:
    """Each of fsspec's implementations raises errors of its own: a server that answers 503 must not end a worker. Those of
    Python's that s3fs makes of answers do not say whose they are."""
    try:
        yield
    except (OSError, UserError) as error:
        if type(error) not in (OSError, PermissionError) or error.filename or url in str(error):  # type: ignore[union-attr]
            raise
        named = type(error)(f"{url}: {' '.join(str(error).split())}")
        named.errno = error.errno  # type: ignore[union-attr]
        raise named from error
    except Exception as error:  # each store has errors of its own
        raise OSError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from error


def open_filesystem(url: str, **options: object) -> Any:
    """fsspec's file system for a URL, with options of its own; raises `UserError` naming what has to be installed."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **options)[0]
    except ModuleNotFoundError as error:
        raise UserError(f"{url} needs fsspec: pip install 'fleetbus[stores]'") from error
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {' '.join(str(error).split())}") from error


def open_store(bus: LogBus, store: str, *, run: str, public_url: str = "", policy: str = "") -> WeightsStore:
    """The store that the setting ``weights.store`` names; raises `UserError`. ``policy``: a second one, whose files have the
    names of the first one's."""
    if store == "folder":
        return FolderStore(public_url)
    if store == "nats":
        objects = get_object_store(bus, run)
        if objects is None:
            raise UserError("weights.store = nats needs a NATS server; this bus stores no objects")
        return BusStore(objects, weights_bucket(run), f"{policy}-" if policy else "")
    if "://" not in store:
        raise UserError(f"weights.store = {store}: use folder, nats, or a URL such as s3://bucket/path")
    below = f"/{policy}" if policy else ""
    return FsspecStore(store.rstrip("/") + below, public_url and public_url.rstrip("/") + below)


def get_object_store(bus: LogBus, run: str) -> ObjectStore | None:
    """The bucket of a run's weights and manifests, None if the bus stores no objects (the bus in memory)."""
    return bus.objects(weights_bucket(run))


def get_image_store(bus: LogBus, run: str) -> ObjectStore | None:
    """The bucket of a run's images, None if the bus stores no objects."""
    return bus.objects(images_bucket(run))


def get_every_object(bus: LogBus, run: str) -> ReadStore | None:
    """Images, manifests and weights of a run for who may read both buckets; runs of before have them in one."""
    images, weights = get_image_store(bus, run), get_object_store(bus, run)
    return ReadStore(images, weights) if images is not None and weights is not None else None


class ReadStore:
    """Objects of two buckets that are named by their SHA-256, read alone. Who may store in the first cannot hide what is in the
    second behind something else of its name."""

    def __init__(self, first: ObjectStore, second: ObjectStore) -> None:
        self._first = first
        self._second = second

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        """See `fleetbus.bus.objects.ObjectStore`."""
        try:
            return await get_content(self._first, name, max_bytes=max_bytes)
        except BusClosed:
            raise
        except (ObjectMissing, BusError) as first:  # a run of before has no such bucket
            try:
                return await get_content(self._second, name, max_bytes=max_bytes)
            except ObjectMissing as second:
                raise (second if isinstance(first, BusError) else first) from None
