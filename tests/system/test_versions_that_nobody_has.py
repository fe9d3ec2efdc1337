"""A version whose weights cannot be had: workers go on with the one that they have, those that begin with the one before."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import RequestUnanswered
from fleetbus.log.newest_version import find_versions_before
from fleetbus_schemas import PolicyPublished, Subjects, encode
from fleetbus_workers.inference.base import WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.inference.worker import LONGEST_RELOAD_SECONDS, RELOAD_SECONDS, TRIES_AT_ONCE
from tests.support.single_engine import inference_worker
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

RUN = "gone"
POLICY = Subjects(RUN).policy("default")


class Choosy(ScriptedSampler):
    """Takes all versions but those that are ``gone``; ``tried`` has when each was."""

    def __init__(self, *gone: int) -> None:
        super().__init__()
        self.gone = set(gone)
        self.tried: list[tuple[int, float]] = []
        self.loaded = anyio.Event()

    async def load(self, policy: PolicyPublished) -> None:
        self.tried.append((policy.version, anyio.current_time()))
        if policy.version in self.gone:
            raise WeightsRejected("no such file")
        await super().load(policy)
        self.loaded.set()


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=version, lineage="l1", step=version, uri="file:///none", manifest=(), size_bytes=0
    )


async def test_a_worker_that_begins_goes_on_from_the_newest_version_that_can_be_had_until_there_is_a_newer_one() -> None:
    sampler, server = Choosy(3, 4), MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        for version in range(5):
            await bus.publish(POLICY, encode(published(version)))
        async with inference_worker(bus, RUN, sampler):
            with anyio.fail_after(60):
                await sampler.loaded.wait()
            assert sampler.version == 2
            await anyio.sleep(600)
            assert sampler.version == 2 and sampler.tried[-1][0] == 4, "the newest is tried further"
            sampler.loaded = anyio.Event()
            await bus.publish(POLICY, encode(published(5)))
            with anyio.fail_after(1):
                await sampler.loaded.wait()
            assert sampler.version == 5


async def test_of_a_log_of_thousands_of_versions_few_are_read_for_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the manifest of a whole model, and each worker that begins looks for one with every try."""
    sampler, server, read = Choosy(1999), MemoryServer(), 0
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        for version in range(2000):
            await bus.publish(POLICY, encode(published(version)))
        scan = bus.scan

        async def count(subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
            nonlocal read
            async for entry in scan(subjects, start=start):
                read += subjects == [POLICY]
                yield entry

        monkeypatch.setattr(bus, "scan", count)
        async with inference_worker(bus, RUN, sampler):
            with anyio.fail_after(60):
                await sampler.loaded.wait()
        assert sampler.version == 1998 and 0 < read < 50


@pytest.mark.parametrize("between", [0, 1, 40])
async def test_the_versions_before_one_are_found_however_far_apart_they_stand(between: int) -> None:
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        positions = []
        for version in range(6):
            for _ in range(between):
                await bus.publish(Subjects(RUN).policy("another"), encode(published(version)))
            positions.append((await bus.publish(POLICY, encode(published(version)))).sequence)
        for number, position in enumerate(positions):
            found = await find_versions_before(bus, POLICY, position, most=3)
            assert [each.version for each in found] == list(range(number))[-3:]


async def test_a_version_that_nobody_has_is_tried_for_a_minute_as_if_it_were_on_its_way_and_then_less_often() -> None:
    sampler, server = Choosy(1), MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        await bus.publish(POLICY, encode(published(0)))
        async with inference_worker(bus, RUN, sampler):
            await sampler.loaded.wait()
            await bus.publish(POLICY, encode(published(1)))
            await anyio.sleep(3600)
            times = [at for version, at in sampler.tried if version == 1]
            pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
            first, later = pauses[:TRIES_AT_ONCE], pauses[TRIES_AT_ONCE + 4 :]
            assert set(first) == {RELOAD_SECONDS} and set(later) == {LONGEST_RELOAD_SECONDS}
            sampler.gone.clear()
            await anyio.sleep(LONGEST_RELOAD_SECONDS)
            assert sampler.version == 1


class Late(ScriptedSampler):
    """Has a version at the time that ``arrives`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.arrives: dict[int, float] = {}

    async def load(self, policy: PolicyPublished) -> None:
        if anyio.current_time() < self.arrives[policy.version]:
            raise WeightsRejected("no such file")
        await super().load(policy)


@pytest.mark.parametrize(("late_seconds", "behind"), [(20, 3), (45, 7)])
async def test_a_worker_whose_files_arrive_later_than_the_next_versions_is_some_behind_and_no_more(
    late_seconds: int, behind: int
) -> None:
    """Each new version began its tries anew, and few of those before were tried: so none was ever loaded."""
    sampler, server = Late(), MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus, inference_worker(bus, RUN, sampler):
        for version in range(60):
            sampler.arrives[version] = anyio.current_time() + late_seconds * (version > 0)
            await bus.publish(POLICY, encode(published(version)))
            await anyio.sleep(8)
            assert version < 12 or sampler.version >= version - behind


class Hanging(ScriptedSampler):
    """Takes 30 s to say that it has no version, as a disk that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[int] = []

    async def load(self, policy: PolicyPublished) -> None:
        self.tried.append(policy.version)
        await anyio.sleep(30)
        raise WeightsRejected("the disk does not answer")


async def test_a_disk_that_hangs_is_asked_for_few_versions_before_the_newest_is_tried_again() -> None:
    sampler, server = Hanging(), MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        for version in range(20):
            await bus.publish(POLICY, encode(published(version)))
        async with inference_worker(bus, RUN, sampler):
            await anyio.sleep(600)
    assert sampler.tried[:9] == [19, 19, 19, 18, 17, 19, 18, 17, 19]


async def ask(fleet: SmallDeployment) -> None:
    await fleet.request("e")
    await fleet.result("e")


async def test_its_heartbeat_says_which_version_it_lacks_while_it_answers() -> None:
    async with small_deployment(build_configuration()) as fleet:
        await fleet.publish_policy(1)
        await fleet.heard(fleet.inference("i1", sampler=Choosy(1)), fleet.environment("e1"))
        with anyio.fail_after(60):
            await fleet.until(lambda: fleet.beats["i1"].counters.get("versions_loaded") == 1)
            assert "version 1" in fleet.beats["i1"].problem, "the newest is lacking, whatever was loaded instead"
            await ask(fleet)
        await anyio.sleep(120)
        assert fleet.beats["i1"].policy_version == 0
        assert fleet.beats["i1"].problem == "weights of version 1 rejected: no such file"


async def test_a_log_that_does_not_answer_once_is_asked_again_for_a_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that waits for fresh groups publishes no newer version, after which the log would be asked again."""
    sampler, server, asked = Choosy(1, 2), MemoryServer(), 0
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        await bus.publish(POLICY, encode(published(0)))
        async with inference_worker(bus, RUN, sampler):
            await sampler.loaded.wait()

            async def find(*arguments: Any, **named: Any) -> list[PolicyPublished]:
                nonlocal asked
                asked += 1
                sampler.gone.discard(1)
                if asked == 1:
                    raise RequestUnanswered("no answer")
                return await find_versions_before(*arguments, **named)

            monkeypatch.setattr("fleetbus_workers.inference.worker.find_versions_before", find)
            for version in (1, 2):
                await bus.publish(POLICY, encode(published(version)))
            await anyio.sleep(600)
        assert (sampler.version, asked) == (1, 2)


class Heavy(ScriptedSampler):
    """Takes 400 s to load a version."""

    async def load(self, policy: PolicyPublished) -> None:
        await anyio.sleep(400)
        await super().load(policy)


async def test_a_worker_that_takes_longer_for_a_version_than_a_step_lasts_is_one_behind_and_no_more() -> None:
    """It loaded each of them, and so was further behind with every step: all that it sampled was stale."""
    sampler, server = Heavy(), MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus, inference_worker(bus, RUN, sampler):
        for version in range(30):
            await bus.publish(POLICY, encode(published(version)))
            await anyio.sleep(100)
        assert sampler.version >= 30 - 2 * 400 / 100 - 1
        await anyio.sleep(800)
        assert sampler.version == 29
