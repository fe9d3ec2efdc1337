"""Models of tens of thousands of tensors: their manifest goes through the object bucket, and a version is loaded as ever."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.objects import ObjectMissing
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects, TensorEntry
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WeightsRejected
from fleetbus_workers.weights.store import get_object_store
from tests.support.servers import connect, run_server

RUN = "experts"
SUBJECTS = Subjects(RUN)
TENSORS = 18_432
"""48 layers of 128 experts with three matrices each: several MB of names, shapes and hashes."""


class Experts(ScriptedTrainer):
    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        self.updates += 1
        super().save_weights(file)
        digest = hashlib.sha256(str(self.updates).encode()).hexdigest()
        return tuple(
            TensorEntry(name=f"model.layers.{number}.weight", shape=(768, 2048), dtype="BF16", sha256=digest)
            for number in range(TENSORS)
        )


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with run_server(tmp_path / "nats") as server, connect(server.url, run=RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        yield bus


@pytest.fixture
async def publication(bus: Bus, tmp_path: Path) -> Publication:
    train, started = FencedAppender(bus, SUBJECTS.train("default"), 0), LineageStarted(lineage="l1", worker="learner")
    await train.append(started)
    publication = Publication(
        bus, SUBJECTS, Experts(), policy="default", lineage="l1", folder=tmp_path / "weights", keep=2, runtime=Runtime(),
        objects=get_object_store(bus, RUN),
    )  # fmt: skip
    await publication.fence(started)
    return publication


async def versions(bus: Bus) -> list[PolicyPublished]:
    entries = [entry async for entry in bus.scan([SUBJECTS.policy("default")])]
    return [message for _, message in decode_entries(PolicyPublished, entries, beside=(LineageStarted,))]


@pytest.mark.integration
async def test_a_manifest_that_fits_no_message_comes_to_the_engine_whole(
    bus: Bus, publication: Publication, tmp_path: Path
) -> None:
    await publication.publish(0)

    (announced,) = await versions(bus)
    assert (announced.manifest, len(announced.manifest_object)) == ((), 64)
    local = await WeightsFetcher(tmp_path / "copies", get_object_store(bus, RUN)).fetch_local(announced)
    assert [entry.name for entry in local.manifest] == [f"model.layers.{number}.weight" for number in range(TENSORS)]
    assert not [path async for path in anyio.Path(tmp_path).rglob("*") if path.suffix == ".json"]


async def test_manifests_go_with_their_versions(bus: Bus, publication: Publication, tmp_path: Path) -> None:
    for step in range(4):
        await publication.publish(step)

    objects = get_object_store(bus, RUN)
    assert objects is not None
    gone, kept = (await versions(bus))[:2], (await versions(bus))[2:]
    for version in gone:
        with pytest.raises(ObjectMissing):
            await objects.get(version.manifest_object, tmp_path / "manifest")
    fetcher = WeightsFetcher(tmp_path / "copies", objects)
    assert [len((await fetcher.fetch_local(version)).manifest) for version in kept] == [TENSORS] * 2


async def test_a_manifest_that_several_versions_share_stays_until_the_last_of_them_goes(
    bus: Bus, publication: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a batch without any gradient: the weights are those of before, and so are their hashes."""
    monkeypatch.setattr(Experts, "updates", property(lambda _: 1, lambda _, value: None), raising=False)
    for step in range(3):
        await publication.publish(step)

    *_, newest = await versions(bus)
    local = await WeightsFetcher(tmp_path / "copies", get_object_store(bus, RUN)).fetch_local(newest)
    assert len(local.manifest) == TENSORS


async def test_a_version_whose_manifest_is_gone_is_rejected_in_one_line(
    bus: Bus, publication: Publication, tmp_path: Path
) -> None:
    await publication.publish(0)
    (announced,) = await versions(bus)
    objects = get_object_store(bus, RUN)
    assert objects is not None
    await objects.remove(announced.manifest_object)

    with pytest.raises(WeightsRejected, match=announced.manifest_object) as rejected:
        await WeightsFetcher(tmp_path / "copies", objects).fetch_local(announced)
    assert "\n" not in str(rejected.value)
