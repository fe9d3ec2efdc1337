"""Versions of the policy as a learner publishes them, beside another learner that has replaced it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus_schemas import LineageStarted, Subjects, encode
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.learner.publication import Publication, prune_versions
from fleetbus_workers.learner.scripted import ScriptedTrainer

pytestmark = pytest.mark.anyio

RUN = "versions"


class SlowStore:
    """Another learner publishes so many versions while this one is taken; with none, somebody removes the file."""

    def __init__(self, folder: Path, later_versions: int) -> None:
        self._folder = folder
        self._later_versions = later_versions

    async def put(self, file: Path) -> str:
        return self._read_late(file)

    def _read_late(self, file: Path) -> str:
        for version in range(1, self._later_versions + 1):
            (self._folder / f"l2-v{version:06d}.safetensors").write_text("{}")
        prune_versions(self._folder, 2) if self._later_versions else file.unlink()
        return file.read_text()

    async def remove(self, file: Path) -> None:
        return


@pytest.mark.parametrize(("later_versions", "raised"), [(2, LearnerReplaced), (0, FileNotFoundError)])
async def test_a_learner_whose_version_a_later_one_has_removed_as_old_is_told_that_it_was_replaced(
    later_versions: int, raised: type[Exception], tmp_path: Path
) -> None:
    """Its upload waited for the server: the file that it came back to was gone, and the learner ended of that."""
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        publication = Publication(
            bus, Subjects(RUN), ScriptedTrainer(), policy="default", lineage="l1", folder=tmp_path, keep=2,
            runtime=Runtime(), store=SlowStore(tmp_path, later_versions),
        )  # fmt: skip
        await publication.fence(LineageStarted(lineage="l1", worker="w"))
        if later_versions:
            await bus.publish(Subjects(RUN).policy("default"), encode(LineageStarted(lineage="l2", worker="other")))
        with pytest.raises(raised):
            await publication.publish(0)
