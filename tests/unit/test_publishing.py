"""Weights of a loop of one's own as versions of a run's policy."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.log.newest_version import find_newest_version
from fleetbus_schemas import Subjects
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.trainers.publishing import open_publisher
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
