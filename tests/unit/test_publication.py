"""Versions of the policy as a learner publishes them, beside another learner that has replaced it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.log.newest_version import find_newest_version
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects, encode
from fleetbus_workers.learner import publication as module
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


def write_difference(file: Path, *, base: Path, base_uri: str) -> Path:
    delta = file.with_suffix(".delta")
    delta.write_text(base_uri)
    return delta


async def begin(
    bus: MemoryBus, lineage: str, folder: Path, *leagues: str, baselines: dict[str, PolicyPublished] | None = None
) -> Publication:
    publication = Publication(
        bus, Subjects(RUN), ScriptedTrainer(), policy="default", lineage=lineage, folder=folder, keep=2, leagues=leagues,
        runtime=Runtime(), full_every=4, baselines=baselines,
    )  # fmt: skip
    await publication.fence(LineageStarted(lineage=lineage, worker="w"))
    return publication


def versions_of(publication: Publication) -> dict[str, int]:
    return {policy: published.version for policy, published in publication.baselines.items()}


async def test_the_first_version_of_a_league_is_whole_and_the_same_for_all_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that begins late, where versions are published as differences to others that are gone."""
    monkeypatch.setattr(module, "write_smaller", write_difference)
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        before = await begin(bus, "l1", tmp_path)
        for step in range(10):
            await before.publish(step)
        assert before.baselines == {}
        with_league = await begin(bus, "l2", tmp_path, "second")
        for step in range(10, 20):
            await with_league.publish(step)
        assert versions_of(with_league) == {"second": 10}
        named = await find_newest_version(bus, Subjects(RUN).policy("second"))
        assert named is not None and (named[1].policy, named[1].version) == ("default", 10)
        assert Path(named[1].uri.removeprefix("file://")).suffix == ".safetensors"
        assert (tmp_path / "l2-v000010.safetensors").exists()
        elsewhere = await begin(bus, "l3", tmp_path / "empty", "second", "third")
        await elsewhere.publish(20)
        assert versions_of(elsewhere) == {"second": 10, "third": 20}


async def test_of_two_learners_one_names_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads an old state of the log is refused, and reads again."""
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        await (await begin(bus, "l1", tmp_path, "second")).publish(0)
        later, is_late = await begin(bus, "l2", tmp_path, "second"), [True]
        scan = MemoryBus.scan

        async def scan_late(bus: MemoryBus, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
            if is_late:
                is_late.pop()
                return
            async for entry in scan(bus, subjects, start=start):
                yield entry

        monkeypatch.setattr(MemoryBus, "scan", scan_late)
        await later.publish(0)
        assert not is_late and versions_of(later) == {"second": 0}


async def test_a_log_that_has_lost_the_first_version_has_it_again_from_the_checkpoint(tmp_path: Path) -> None:
    """As one that was restored from an archive that forgets."""
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        before = await begin(bus, "l1", tmp_path, "second")
        await before.publish(0)
        await bus.purge(Subjects(RUN).policy("second"), below=100)
        after = await begin(bus, "l2", tmp_path, "second", baselines=before.baselines)
        await after.publish(1)
        assert versions_of(after) == {"second": 0}
        found = await find_newest_version(bus, Subjects(RUN).policy("second"))
        assert found is not None and found[1] == before.baselines["second"]
