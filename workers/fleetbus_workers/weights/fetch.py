"""A published version as a local file, wherever it lies and whether it is whole or a difference.

For engines, which read files only. Nothing here checks values: the engine does, against the manifest, before it takes them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import OrderedDict
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio.to_thread
import msgspec

from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError, UserError
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.weights.delta import apply_delta, base_of
from fleetbus_workers.weights.file import WeightsRejected
from fleetbus_workers.weights.manifests import get_manifest
from fleetbus_workers.weights.store import OBJECT_SCHEME, filesystem

LONGEST_CHAIN = 64
"""Differences upon differences; a learner publishes a whole version far more often."""

KEPT = 2
"""Local copies: the version in use, and the one that is loaded beside it."""


class WeightsFetcher:
    """Fetches into ``folder`` (its own; created when needed) and keeps the newest two versions there."""

    def __init__(self, folder: Path, objects: ObjectStore | None) -> None:
        self._folder = folder
        self._objects = objects
        self._local: OrderedDict[str, Path] = OrderedDict()

    async def local(self, published: PolicyPublished) -> PolicyPublished:
        """The same version with the URI of a local file and its manifest; raises `WeightsRejected` in one line when one of them
        cannot be had."""
        if not published.uri:
            return published
        try:
            file = await self._materialise(published.uri, LONGEST_CHAIN)
            if published.manifest_object and self._objects is not None:
                published = await get_manifest(self._objects, published, self._folder)
        except (OSError, ObjectMissing, BusError, UserError, ValueError) as error:
            raise WeightsRejected(f"{published.uri}: {' '.join(str(error).split())}") from error
        return msgspec.structs.replace(published, uri=file.absolute().as_uri())

    def close(self) -> None:
        """Remove the copies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _materialise(self, uri: str, depth: int) -> Path:
        """A local file with the whole version of ``uri``."""
        if uri in self._local:
            self._local.move_to_end(uri)
            return self._local[uri]
        if not depth:
            raise WeightsRejected(f"{uri}: more than {LONGEST_CHAIN} differences without a whole version")
        file = await self._downloaded(uri)
        if not file.name.endswith(".delta"):
            return self._keep(uri, file)
        base_uri = await anyio.to_thread.run_sync(base_of, file)
        if base_uri is None:
            raise WeightsRejected(f"{uri}: names no base")
        base = await self._materialise(base_uri, depth - 1)
        whole = self._place(uri, ".safetensors")
        self._folder.mkdir(parents=True, exist_ok=True)
        await anyio.to_thread.run_sync(lambda: apply_delta(file, base=base, file=whole))
        self._forget(file)
        return self._keep(uri, whole)

    async def _downloaded(self, uri: str) -> Path:
        """The file of a URI: itself if it is local, else a copy."""
        parts = urlsplit(uri)
        if parts.scheme in ("", "file"):
            return Path(unquote(parts.path))
        file = self._place(uri, "".join(Path(parts.path).suffixes[-1:]))
        self._folder.mkdir(parents=True, exist_ok=True)
        if parts.scheme == OBJECT_SCHEME:
            if self._objects is None:
                raise WeightsRejected(f"{uri}: this worker has no object store")
            await self._objects.get(parts.path.lstrip("/"), file)
        else:
            await anyio.to_thread.run_sync(lambda: filesystem(uri).get_file(uri, str(file)), abandon_on_cancel=True)
        return file

    def _place(self, uri: str, suffix: str) -> Path:
        return self._folder / f"{hashlib.sha256(uri.encode()).hexdigest()[:24]}{suffix}"

    def _keep(self, uri: str, file: Path) -> Path:
        self._local[uri] = file
        while len(self._local) > KEPT:
            self._forget(self._local.popitem(last=False)[1])
        return file

    def _forget(self, file: Path) -> None:
        """Remove a copy; what was not copied is not ours."""
        if file.parent == self._folder:
            file.unlink(missing_ok=True)
