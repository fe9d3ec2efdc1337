"""Weights of a loop of one's own as versions of a run's policy."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from fleetbus.bus.base import Bus, PublishAck
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, LearnerSettings, RunSettings, WeightsSettings
from fleetbus.log.episodes import decode_entries
from fleetbus.log.newest_version import find_newest_version
from fleetbus_schemas import LineageStarted, PolicyPublished, Subjects
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.trainers.publishing import open_publisher
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import read_weights

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.anyio

RUN = "own"


def build_tensors(value: float) -> list[tuple[str, Any]]:
    return [("model.weight", torch.full((2, 3), value)), ("model.bias", torch.zeros(3))]


def write_in_future(folder: Path) -> None:
    """What is in a folder is newer than whoever was started up to now."""
    for file in folder.rglob(".sent-*"):
        os.utime(file, (time.time() + 1, time.time() + 1))


async def test_published_weights_are_what_the_newest_version_in_the_log_names(tmp_path: Path) -> None:
    configuration = Configuration(run=RunSettings(name=RUN, folder=str(tmp_path)))
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        publisher = await open_publisher(bus, configuration)
        assert [await publisher.publish(build_tensors(step), step=step) for step in (1, 2)] == [0, 1]
        found = await find_newest_version(bus, Subjects(RUN).policy("default"))
        assert found is not None
        newest = found[1]
        assert (newest.version, newest.step) == (1, 2)
        read = read_weights(newest.uri, newest.manifest)
        assert torch.equal(read["model.weight"], torch.full((2, 3), 2.0))


async def test_who_published_before_is_refused_and_no_number_comes_twice(tmp_path: Path) -> None:
    configuration = Configuration(run=RunSettings(name=RUN, folder=str(tmp_path)))
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        first = await open_publisher(bus, configuration)
        await first.publish(build_tensors(1.0), step=1)
        second = await open_publisher(bus, configuration)
        with pytest.raises(LearnerReplaced):
            await first.publish(build_tensors(2.0), step=2)
        assert await second.publish(build_tensors(3.0), step=3) == first.version + 1


async def test_who_is_replaced_before_its_first_version_takes_nothing_from_who_replaced_it(tmp_path: Path) -> None:
    """Two programs that are started together: the one that is refused removed what the other was about to publish, which ended,
    too."""
    configuration = Configuration(run=RunSettings(name=RUN, folder=str(tmp_path)))
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        first, second = await open_publisher(bus, configuration), await open_publisher(bus, configuration)
        second._weights.write(build_tensors(2.0))
        write_in_future(tmp_path)
        with pytest.raises(LearnerReplaced):
            await first.publish(build_tensors(1.0), step=1)
        version = await second._publication.publish(2)
        found = await find_newest_version(bus, Subjects(RUN).policy("default"))
        assert found is not None and found[1].version == version
        assert torch.equal(read_weights(found[1].uri, found[1].manifest)["model.weight"], torch.full((2, 3), 2.0))


async def test_versions_that_are_published_side_by_side_come_one_after_another(tmp_path: Path) -> None:
    """As of a loop that trains on meanwhile. Both had one number, and the weights of one of them."""
    configuration = Configuration(run=RunSettings(name=RUN, folder=str(tmp_path)))
    async with MemoryServer().connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        publisher = await open_publisher(bus, configuration)
        async with anyio.create_task_group() as group:
            for step in (1, 2, 3):
                group.start_soon(partial(publisher.publish, build_tensors(step), step=step))
        subject = Subjects(RUN).policy("default")
        entries = [entry async for entry in bus.scan([subject])]
        published = [each for _, each in decode_entries(PolicyPublished, entries, beside=(LineageStarted,))]
        assert [each.version for each in published] == [0, 1, 2] and {each.step for each in published} == {1, 2, 3}
        assert all(read_weights(each.uri, each.manifest)["model.weight"][0, 0] == each.step for each in published)


class StoresUnheard:
    """A bus on which what is stored while ``unheard`` is not answered; then ``stored`` is set."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.unheard = False
        self.stored = anyio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, payload: bytes, **options: Any) -> PublishAck:
        answer = await self._bus.publish(subject, payload, **options)
        if self.unheard:
            self.stored.set()
            await anyio.sleep_forever()
        return answer


async def test_after_a_version_whose_publishing_was_cancelled_comes_a_whole_one_of_another_number(tmp_path: Path) -> None:
    """Of two of one number workers keep the first, and sample from weights that the trainer takes for those of the second."""
    configuration = Configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        weights=WeightsSettings(full_every=8),
        learner=LearnerSettings(keep_weights=1),
    )

    def build_alike(value: float) -> list[tuple[str, Any]]:
        """Their difference is smaller than they are, but not that to ``others``."""
        return [("model.weight", torch.cat([torch.tensor([value]), torch.zeros(4096)]))]

    others = [("model.weight", torch.rand(4097))]

    async with MemoryServer().connect(RUN) as connected:
        await connected.declare(plan_run(RUN, lanes=1))
        bus = StoresUnheard(connected)
        publisher = await open_publisher(cast("Bus", bus), configuration)
        assert await publisher.publish(build_alike(1.0), step=1) == 0
        bus.unheard = True
        async with anyio.create_task_group() as group:
            group.start_soon(partial(publisher.publish, others, step=2))
            await bus.stored.wait()
            group.cancel_scope.cancel()
        bus.unheard = False
        assert await publisher.publish(build_alike(3.0), step=3) == 2
        found = await find_newest_version(connected, Subjects(RUN).policy("default"))
        assert found is not None and (found[1].version, found[1].step) == (2, 3)
        newest = await WeightsFetcher(tmp_path / "copies", None).fetch_local(found[1])
        assert read_weights(newest.uri, newest.manifest)["model.weight"][0] == 3.0
