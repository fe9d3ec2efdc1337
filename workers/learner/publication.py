"""Versions of the policy: weights files in the run's folder, and what tells the inference workers about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fleetbus.bus.base import Bus
from fleetbus.ports import Ports
from schemas import LineageStarted, PolicyPublished, Subjects
from workers.learner.base import Trainer
from workers.learner.beginning import published_versions
from workers.learner.book import Chain

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
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._chain = Chain(bus, subjects.policy(policy), 0)
        self._trainer = trainer
        self._policy = policy
        self._lineage = lineage
        self._folder = folder
        self._keep = keep
        self._ports = ports
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
        manifest = await self._ports.offload(self._trainer.save_weights, file)
        await self._chain.append(
            PolicyPublished(
                policy=self._policy,
                version=version,
                lineage=self._lineage,
                step=step,
                uri=file.as_uri(),
                manifest=manifest,
                size_bytes=file.stat().st_size,
            )
        )
        self.version = version
        await self._ports.offload(prune_versions, self._folder, self._keep)
        return version


def prune_versions(folder: Path, keep: int) -> None:
    """Keep the newest ``keep`` versions: whatever lineage made the others, nobody is told to load them any more.

    Version numbers never repeat; of files with one number the newest lineage's is the one that was published.
    """
    files = sorted((int(found["version"]), int(found["lineage"]), found.string) for found in _versions_in(folder))
    for _, _, name in files[:-keep]:
        (folder / name).unlink(missing_ok=True)


def _versions_in(folder: Path) -> Iterator[re.Match[str]]:
    for path in folder.iterdir():
        found = _FILE.fullmatch(path.name)
        if found is not None:
            yield found
