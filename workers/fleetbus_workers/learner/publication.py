"""Versions of the policy: weights files in the run's folder, and what tells the inference workers about them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.bus.objects import ObjectStore
from fleetbus.errors import BusError, LogFull, PublishUnanswered, RequestUnanswered
from fleetbus.ports import Ports
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.beginning import published_versions
from fleetbus_workers.learner.book import RETRY_SECONDS, Chain
from fleetbus_workers.learner.disk import when_there_is_room
from fleetbus_workers.weights.delta import smaller
from fleetbus_workers.weights.manifests import put_manifest
from fleetbus_workers.weights.store import FolderStore, WeightsStore

log = structlog.get_logger()

_FILE = re.compile(r"l(?P<lineage>\d+)-v(?P<version>\d{6,})\.safetensors")


class Publication:
    """Publishes the versions of one lineage and keeps the newest ``keep`` files. ``version`` is the newest one."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        trainer: Trainer,
        *,
        policy: str,
        lineage: str,
        folder: Path,
        keep: int,
        ports: Ports,
        store: WeightsStore | None = None,
        objects: ObjectStore | None = None,
        full_every: int = 1,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._chain = Chain(bus, subjects.policy(policy), 0)
        self._trainer = trainer
        self._policy = policy
        self._lineage = lineage
        self._folder = folder
        self._keep = max(keep, full_every + 1)  # a difference is of no use without what it is a difference to
        self._ports = ports
        self._store = store or FolderStore()
        self._objects = objects
        self._manifests: dict[str, str] = {}
        """By name of a file the object with its manifest."""
        self._full_every = full_every
        self._newest: tuple[Path, str] | None = None
        self._published = 0
        self.version = -1

    async def fence(self, started: LineageStarted, *, decided_on: Chain) -> dict[int, int]:
        """From now on the learner before is refused; raises `Replaced` when this one is.

        Returns the step of every version so far. The learner before may have published until this very moment, and its
        numbers must not come again.
        """
        await self._chain.take_over(started, decided_on=decided_on)
        versions = await published_versions(self._bus, self._subjects, self._policy)
        self.version = max(versions, default=-1)
        return versions

    async def publish(self, step: int) -> int:
        """Write the current weights under the next version number, announce them, and return the number."""
        version = self.version + 1
        file = (self._folder / f"{self._lineage}-v{version:06d}.safetensors").absolute()
        manifest = await when_there_is_room(self._ports, self._trainer.save_weights, file)
        travelling = await self._travelling(file)
        uri = await self._until_put(file, partial(self._store.put, travelling))
        manifest_object = await self._until_put(file, partial(put_manifest, self._objects, manifest, self._folder))
        await self._chain.append(
            PolicyPublished(
                policy=self._policy,
                version=version,
                lineage=self._lineage,
                step=step,
                uri=uri,
                manifest=() if manifest_object else manifest,
                manifest_object=manifest_object,
                size_bytes=travelling.stat().st_size,
            )
        )
        self.version = version
        self._newest = (file, uri)
        self._published += 1
        if manifest_object:
            self._manifests[file.name] = manifest_object
        for gone in await self._ports.offload(prune_versions, self._folder, self._keep):
            await self._remove(gone)
        return version

    async def _travelling(self, file: Path) -> Path:
        """What is sent of a version: all of it, or its difference to the version before when that is smaller."""
        if self._newest is None or self._published % self._full_every == 0:
            return file
        base, base_uri = self._newest
        travelling: Path = await when_there_is_room(self._ports, partial(smaller, file, base=base, base_uri=base_uri))
        return travelling

    async def _until_put(self, file: Path, put: Callable[[], Awaitable[str]]) -> str:
        while True:
            try:
                return await put()
            except (FileNotFoundError, PermissionError):
                raise
            except (LogFull, PublishUnanswered, RequestUnanswered, OSError) as error:
                log.warning("weights are put again", file=file.name, reason=str(error))
                await anyio.sleep(RETRY_SECONDS)

    async def _remove(self, file: Path) -> None:
        """An old version that stays behind costs room and nothing else."""
        try:
            await self._store.remove(file)
            manifest = self._manifests.pop(file.name, "")
            if self._objects is not None and manifest and manifest not in self._manifests.values():
                await self._objects.remove(manifest)
        except (BusError, OSError) as error:
            log.warning("old weights were not removed", file=file.name, reason=str(error))


def prune_versions(folder: Path, keep: int) -> list[Path]:
    """Keep the newest ``keep`` versions: whatever lineage made the others, nobody is told to load them any more. Returns what
    is gone, differences included.

    Version numbers never repeat; of files with one number the newest lineage's is the one that was published.
    """
    files = sorted((int(found["version"]), int(found["lineage"]), found.string) for found in _versions_in(folder))
    gone = []
    for _, _, name in files[:-keep]:
        for path in (folder / name, (folder / name).with_suffix(".delta")):
            if path.exists():
                path.unlink()
                gone.append(path)
    return gone


def _versions_in(folder: Path) -> Iterator[re.Match[str]]:
    for path in folder.iterdir():
        found = _FILE.fullmatch(path.name)
        if found is not None:
            yield found
