"""Versions of the policy: weights files in the run's folder, and their announcement to the inference workers."""

import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.bus.objects import ObjectStore
from fleetbus.concurrency.runtime import Runtime
from fleetbus.errors import BusError, LogFull, PublishUnanswered, RequestUnanswered
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects
from fleetbus_workers.learner.base import SavesWeights
from fleetbus_workers.learner.baselines import find_or_name_baseline
from fleetbus_workers.learner.disk_full import retry_while_disk_full
from fleetbus_workers.learner.journal import RETRY_SECONDS, FencedAppender
from fleetbus_workers.learner.resume import MadeVersion, read_published_versions
from fleetbus_workers.weights.delta import write_smaller
from fleetbus_workers.weights.manifests import put_manifest
from fleetbus_workers.weights.store import FolderStore, WeightsStore
from fleetbus_workers.weights.transfer import TellsOfWriting, WeightsSender

log = structlog.get_logger()

_FILE = re.compile(r"l(?P<lineage>\d+)-v(?P<version>\d{6,})\.safetensors")
_UNFINISHED = re.compile(r"\.l\d+-v\d{6,}\.(safetensors|delta)\.[0-9a-f]{32}")


class Publication:
    """Publishes the versions of one lineage. ``version`` is the newest. Once one is published, ``baselines`` are the first ones
    of each of ``leagues``: as the log has them, else as a checkpoint had them (the argument), else the one that was published.

    The files of these stay, the newest ``keep`` or ``window``, what ``list_needed`` names, and what they are differences to.
    """

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        trainer: SavesWeights,
        *,
        policy: str,
        lineage: str,
        folder: Path,
        keep: int,
        leagues: Collection[str] = (),
        baselines: Mapping[str, PolicyPublished] | None = None,
        window: int = 0,
        list_needed: Callable[[], Collection[int]] = tuple,
        runtime: Runtime,
        store: WeightsStore | None = None,
        objects: ObjectStore | None = None,
        full_every: int = 1,
        sender: WeightsSender | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._appender = FencedAppender(bus, subjects.policy(policy), 0)
        self._trainer = trainer
        self._policy = policy
        self._lineage = lineage
        self._folder = folder
        self._leagues = leagues
        self._list_needed = list_needed
        self._window = window
        self._keep = max(keep, window)
        self._runtime = runtime
        self._store = store or FolderStore()
        self._objects = objects
        self._manifests: dict[str, str] = {}
        """By name of a file the object with its manifest."""
        self._full_every = full_every
        self._sender = sender
        self._newest: tuple[Path, str] | None = None
        self._published = 0
        self._appended = -1
        """The last version that may stand in the log: an append that was cancelled may have stored it."""
        self.version = -1
        self._known_baselines = baselines or {}
        self.baselines: dict[str, PolicyPublished] = {}

    def run(self) -> AbstractAsyncContextManager[None]:
        """The lifetime of what sends versions beside their files, around all versions. Raises `UserError`."""
        return self._sender.run() if self._sender is not None else nullcontext()

    @property
    def problem(self) -> str:
        """See `FencedAppender.problem`."""
        return self._appender.problem

    async def fence(self, started: LineageStarted) -> dict[int, MadeVersion]:
        """From now on appends of the previous learner are refused; raises `LearnerReplaced` when this one is.

        Returns every version in the log. The learner before may have published until this very moment, and its numbers must not
        come again; nor may those of versions that the log has lost, and that left a file.
        """
        await self._appender.take_over(started)
        await self._runtime.offload(remove_unfinished, self._folder)
        versions = await read_published_versions(self._bus, self._subjects, self._policy)
        left = await self._runtime.offload(list_versions, self._folder)
        self.version = max({*versions, *left}, default=-1)
        return versions

    async def publish(self, step: int) -> int:
        """Write the current weights under the next version number, announce them, and return the number. Raises `LogLost` or
        `LearnerReplaced`, also when a later learner has published so much meanwhile that it has removed the file."""
        try:
            return await self._publish(step)
        except FileNotFoundError:
            await self._appender.check_replaced()
            raise

    async def _publish(self, step: int) -> int:
        version = max(self.version, self._appended) + 1
        file = (self._folder / f"{self._lineage}-v{version:06d}.safetensors").absolute()
        if self._sender is not None and isinstance(self._trainer, TellsOfWriting):
            self._trainer.watcher = await self._sender.offer(version, self._lineage)
        manifest = await retry_while_disk_full(self._runtime, self._trainer.save_weights, file)
        upload = await self._choose_upload(file)
        uri = await self._put_with_retry(file, partial(self._store.put, upload))
        manifest_object = await self._put_with_retry(file, partial(put_manifest, self._objects, manifest))
        published = PolicyPublished(
            policy=self._policy,
            version=version,
            lineage=self._lineage,
            step=step,
            uri=uri,
            manifest=() if manifest_object else manifest,
            manifest_object=manifest_object,
            size_bytes=upload.stat().st_size,
            window=self._window,
        )
        self._appended, self._newest = version, None  # after one that was cancelled comes a whole one, of another number
        await self._appender.append(published)
        self.version = version
        for league in [each for each in self._leagues if each not in self.baselines]:
            subject = self._subjects.policy(league)
            first = self._known_baselines.get(league, published)
            self.baselines[league] = await find_or_name_baseline(self._bus, subject, first)
        self._newest = (file, uri)
        self._published += 1
        if manifest_object:
            self._manifests[file.name] = manifest_object
        needed = {*(each.version for each in self.baselines.values()), *self._list_needed()}
        for removed in await self._runtime.offload(prune_versions, self._folder, self._keep, needed):
            await self._remove(removed)
        return version

    async def _choose_upload(self, file: Path) -> Path:
        """Choose what is sent of a version: all of it, or its difference to the version before when that is smaller."""
        if self._newest is None or self._published % self._full_every == 0:
            return file
        base, base_uri = self._newest
        upload: Path = await retry_while_disk_full(self._runtime, partial(write_smaller, file, base=base, base_uri=base_uri))
        return upload

    async def _put_with_retry(self, file: Path, put: Callable[[], Awaitable[str]]) -> str:
        while True:
            try:
                return await put()
            except (FileNotFoundError, PermissionError):
                raise
            except (LogFull, PublishUnanswered, RequestUnanswered, OSError) as error:
                log.warning("weights upload failed; retrying", file=file.name, reason=str(error))
                await anyio.sleep(RETRY_SECONDS)

    async def _remove(self, file: Path) -> None:
        """Best effort: an old version that is not removed only costs space."""
        try:
            await self._store.remove(file)
            manifest = self._manifests.pop(file.name, "")
            if self._objects is not None and manifest and manifest not in self._manifests.values():
                await self._objects.remove(manifest)
        except (BusError, OSError) as error:
            log.warning("removal of old weights failed; leaving them in the store", file=file.name, reason=str(error))


def prune_versions(folder: Path, keep: int, needed: Collection[int] = ()) -> list[Path]:
    """Keep the newest ``keep`` versions, those that are ``needed``, and what these are differences to: no worker loads the
    others any more, of any lineage. Returns what is gone, differences included.

    Version numbers never repeat; of files with one number the newest lineage's is the one that was published.
    """
    files = sorted((int(found["version"]), int(found["lineage"]), found.string) for found in _list_version_files(folder))
    published = {number: folder / name for number, _, name in files}
    kept = {folder / name for _, _, name in files[-keep:]}
    kept |= {published[number] for number in needed if number in published}
    for number in reversed(published):
        if published[number] in kept and published[number].with_suffix(".delta").exists() and number - 1 in published:
            kept.add(published[number - 1])
    removed = []
    for path in (folder / name for _, _, name in files if folder / name not in kept):
        for each in (path, path.with_suffix(".delta")):
            with suppress(FileNotFoundError):  # it has no difference, or another learner was first
                each.unlink()
                removed.append(each)
    return removed


def remove_unfinished(folder: Path) -> None:
    """Remove what a kill left of versions that were being written, each as large as the model. Blocking."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def list_versions(folder: Path) -> set[int]:
    """The versions that have a file. Blocking."""
    return {int(found["version"]) for found in _list_version_files(folder)} if folder.is_dir() else set()


def _list_version_files(folder: Path) -> Iterator[re.Match[str]]:
    for path in folder.iterdir():
        found = _FILE.fullmatch(path.name)
        if found is not None:
            yield found
