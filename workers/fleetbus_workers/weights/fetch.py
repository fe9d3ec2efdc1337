"""A published version as a local file, wherever it lies and whether it is whole or a difference.

For engines, which read files only. Nothing here checks values: the engine does, against the manifest, before it takes them.
"""

import hashlib
import math
import shutil
import uuid
from collections import OrderedDict
from pathlib import Path
from threading import Event
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread
import msgspec
import structlog

from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.weights.delta import apply_delta, read_base_uri
from fleetbus_workers.weights.file import MAX_HEADER_BYTES, WeightsRejected, expect_file
from fleetbus_workers.weights.manifests import get_manifest
from fleetbus_workers.weights.store import OBJECT_SCHEME, download

MAX_DELTA_CHAIN = 64
"""Differences upon differences; a learner publishes a whole version far more often."""

MAX_LOCAL_COPIES = 2
"""Local copies: the version in use, and the one that is loaded beside it."""

WIDEST_BYTES = 8
"""Of one number of a tensor."""

MOST_NUMBERS = 1e18
"""Along one dimension of a tensor, whatever a manifest says: its whole numbers may have thousands of digits."""

LOOK_SECONDS = 30.0
"""How long a shared disk may take to say whether a file is there. One that hangs would keep a worker from newer versions, and
all episodes waiting that were asked for after this one."""

log = structlog.get_logger()


class WeightsFetcher:
    """Fetches into ``folder`` (its own; created when needed) and keeps the newest two versions there. What a process that was
    killed left there is removed."""

    def __init__(self, folder: Path, objects: ObjectStore | None) -> None:
        self._folder = folder
        self._objects = objects
        self._copies: OrderedDict[str, Path] = OrderedDict()
        self._asked: dict[Path, Event] = {}
        """By file that a disk did not answer about in time, set once its thread has ended, which nothing but the disk ends."""
        self._looking = anyio.CapacityLimiter(math.inf)
        shutil.rmtree(folder, ignore_errors=True)

    async def fetch_local(self, published: PolicyPublished) -> PolicyPublished:
        """The same version with the URI of a local file and its manifest; raises `WeightsRejected` in one line when one of them
        cannot be had."""
        if not published.uri:
            return published
        try:
            if published.manifest_object and self._objects is not None:
                published = await get_manifest(self._objects, published)
            file = await self._materialise(published.uri, MAX_DELTA_CHAIN, _find_max_bytes(published))
        except (OSError, ObjectMissing, BusError, UserError, ValueError) as error:
            raise WeightsRejected(f"{published.uri}: {' '.join(str(error).split())}") from error
        return msgspec.structs.replace(published, uri=file.absolute().as_uri())

    def discard_copies(self) -> None:
        """An engine rejected what was fetched: it, or what it was made of, may have been damaged on its way."""
        while self._copies:
            self._remove_copy(self._copies.popitem()[1])

    def close(self) -> None:
        """Remove the copies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _materialise(self, uri: str, depth: int, max_bytes: float) -> Path:
        """A local file with the whole version of ``uri``."""
        if uri in self._copies:
            self._copies.move_to_end(uri)
            return self._copies[uri]
        if not depth:
            raise WeightsRejected(f"{uri}: more than {MAX_DELTA_CHAIN} differences without a whole version")
        file = await self._download(uri, max_bytes)
        if not file.name.endswith(".delta"):
            return self._remember(uri, file)
        try:
            return self._remember(uri, await self._apply(file, uri, depth, max_bytes))
        finally:
            self._remove_copy(file)

    async def _apply(self, delta: Path, uri: str, depth: int, max_bytes: float) -> Path:
        """The whole version that a difference makes of its base."""
        base_uri = await anyio.to_thread.run_sync(read_base_uri, delta)
        if base_uri is None:
            raise WeightsRejected(f"{uri}: names no base")
        if base_uri.rpartition("/")[0] != uri.rpartition("/")[0]:  # what a store holds names no other place to read
            raise WeightsRejected(f"{uri}: its base {base_uri[:200]!r} lies elsewhere")
        base = await self._materialise(base_uri, depth - 1, max_bytes)
        whole = self._build_path(uri, ".safetensors")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            await anyio.to_thread.run_sync(lambda: apply_delta(delta, base=base, file=whole))
        except (WeightsRejected, OSError):
            self.discard_copies()
            raise
        return whole

    async def _download(self, uri: str, max_bytes: float) -> Path:
        """The file of a URI: itself if it is local, else a copy."""
        parts = urlsplit(uri)
        if parts.scheme in ("", "file"):
            await self._look_at(found := Path(unquote(parts.path)))
            return found
        file = self._build_path(uri, "".join(Path(parts.path).suffixes[-1:]))
        self._folder.mkdir(parents=True, exist_ok=True)
        if parts.scheme == OBJECT_SCHEME:
            if self._objects is None:
                raise WeightsRejected(f"{uri}: this worker has no object store")
            await self._objects.get(parts.path.lstrip("/"), file)
        else:
            await anyio.to_thread.run_sync(_download_whole, uri, file, max_bytes, abandon_on_cancel=True)
        return file

    async def _look_at(self, file: Path) -> None:
        """See `expect_file`. Raises `WeightsRejected` while the disk does not answer, too; it is asked once."""
        if file not in self._asked or self._asked[file].is_set():
            ended = Event()
            ended.set()  # one that is cancelled early has no thread

            def look() -> None:
                ended.clear()
                try:
                    expect_file(file)
                finally:
                    ended.set()

            with anyio.move_on_after(LOOK_SECONDS):
                await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=self._looking)
                self._asked.pop(file, None)
                return
            self._asked[file] = ended
        raise WeightsRejected(f"{file}: the disk does not answer")

    def _build_path(self, uri: str, suffix: str) -> Path:
        return self._folder / f"{hashlib.sha256(uri.encode()).hexdigest()[:24]}{suffix}"

    def _remember(self, uri: str, file: Path) -> Path:
        self._copies[uri] = file
        while len(self._copies) > MAX_LOCAL_COPIES:
            self._remove_copy(self._copies.popitem(last=False)[1])
        return file

    def _remove_copy(self, file: Path) -> None:
        """Remove a copy; files that were not copied here are left alone."""
        if file.parent == self._folder:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("removal of a copy of weights failed; leaving it", file=file.name, reason=str(error))


def _find_max_bytes(published: PolicyPublished) -> float:
    """No file that this version, or one that it is a difference to, is made of is larger: else a server that sends without end
    would fill the disk. Infinity if it has no manifest here. In floats: exact products of long numbers take hours."""
    if not published.manifest:
        return math.inf
    shapes = ((min(max(size, 0), MOST_NUMBERS) for size in entry.shape) for entry in published.manifest)
    numbers = sum(math.prod(shape, start=1.0) for shape in shapes)
    return max(published.size_bytes, WIDEST_BYTES * numbers) + MAX_HEADER_BYTES


def _download_whole(uri: str, file: Path, max_bytes: float) -> None:
    """Download beside ``file`` first: nobody waits for a thread that was abandoned, and it may end in the middle of another
    download of the same."""
    partial = file.with_name(f".{uuid.uuid4().hex}{file.suffix}")
    try:
        download(uri, partial, max_bytes=max_bytes)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
