"""An engine that plays several versions: each turn by its own, none while another runs, none left waiting for ever."""

from __future__ import annotations

import random
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import PolicyPublished, SamplingSettings, Subjects, encode
from fleetbus_workers.inference.base import Generation, GenerationRequest, WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.inference.snapshots import PAUSES_SECONDS, PublishedVersions, SnapshotSampler
from fleetbus_workers.inference.turn_rules import VersionSuperseded
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

pytestmark = pytest.mark.anyio

TRIES = len(PAUSES_SECONDS) + 1

REQUEST = GenerationRequest(cache_key="e", ids=(2,), sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=4, seed=1)


def publish(version: int) -> PolicyPublished:
    return PolicyPublished(policy="default", version=version, lineage="l1", step=version, uri="", manifest=(), size_bytes=0)


async def find(version: int) -> PolicyPublished:
    return publish(version)


class Engine(ScriptedSampler):
    """Takes a second a turn, and fails if weights come in the midst of one."""

    def __init__(self) -> None:
        super().__init__(delay=lambda _: 1.0)
        self.running = self.most = 0
        self.loads: list[int] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().generate(request)
        finally:
            self.running -= 1

    async def load(self, policy: PolicyPublished) -> None:
        assert not self.running, "a turn would be of two versions"
        await anyio.sleep(0.1)
        self.loads.append(policy.version)
        await super().load(policy)


async def play(sampler: SnapshotSampler, version: int | None, played: list[int]) -> None:
    async with sampler.hold(version):
        generation = await sampler.generate(REQUEST)
    assert [span.version for span in generation.versions] == [version]
    assert version is not None
    played.append(version)


async def test_each_turn_is_answered_by_the_version_that_it_asks_for() -> None:
    engine, played = Engine(), list[int]()
    sampler = SnapshotSampler(engine, find)
    async with anyio.create_task_group() as group:
        for number in range(30):
            group.start_soon(play, sampler, (3, 0, 7)[number % 3], played)
    assert sorted(played) == [0] * 10 + [3] * 10 + [7] * 10
    assert sorted(engine.loads) == [0, 3, 7], "those that wait for one version are played together"
    assert engine.most == 10


async def test_no_version_starves_beside_one_that_is_always_asked_for() -> None:
    sampler, played = SnapshotSampler(Engine(), find), list[int]()

    async def ask_on(group_drain: anyio.Event) -> None:
        while not group_drain.is_set():
            await play(sampler, 1, played)

    drain = anyio.Event()
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask_on, drain)
        await anyio.sleep(0.5)
        with anyio.fail_after(5):
            await play(sampler, 0, played)
        drain.set()


async def test_a_turn_that_is_cancelled_leaves_the_others_their_way() -> None:
    engine, played = Engine(), list[int]()
    sampler = SnapshotSampler(engine, find)
    for moment in (0.05, 0.5, 1.05, 1.5):  # while it loads, runs, waits behind one that loads, and behind one that runs
        async with anyio.create_task_group() as group:
            if moment > 1:
                group.start_soon(play, sampler, 0, played)
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(moment):
                await play(sampler, 1 if moment > 1 else 5, played)
            with anyio.fail_after(10):
                await play(sampler, 2, played)
    assert played.count(2) == 4


@pytest.mark.parametrize("failures", [TRIES - 1, TRIES])
async def test_a_version_that_cannot_be_had_is_tried_again_and_then_gone(failures: int) -> None:
    tried: list[float] = []

    async def fail(version: int) -> PolicyPublished:
        if version == 4:
            tried.append(anyio.current_time())
            if len(tried) <= failures:
                raise WeightsRejected("the store is away")
        return publish(version)

    sampler, played = SnapshotSampler(Engine(), fail), list[int]()
    async with anyio.create_task_group() as group:
        if failures < TRIES:
            await play(sampler, 4, played)
        else:
            group.start_soon(play, sampler, 0, played)
            with pytest.raises(VersionSuperseded, match="version 4 cannot be loaded any more: the store is away"):
                await play(sampler, 4, played)
    assert len(tried) == TRIES
    assert tried[-1] - tried[0] >= sum(PAUSES_SECONDS) > 60, "a store may be away for a minute"
    with anyio.fail_after(5):
        await play(sampler, 1, played)


async def test_a_turn_that_asks_for_no_version_is_refused() -> None:
    with pytest.raises(VersionSuperseded, match="asks for none"):
        await play(SnapshotSampler(Engine(), find), None, [])


async def test_versions_are_read_from_the_log_as_they_are_asked_for() -> None:
    server, subject, other = MemoryServer(), Subjects("run").policy("default"), Subjects("run").policy("second")
    server.declare(plan_run("run", lanes=2))
    async with server.connect("run") as bus:
        versions = PublishedVersions(bus, [subject, other])
        for version in (0, 1, 2):
            await bus.publish(subject, encode(publish(version)))
        assert (await versions.find(1)).version == 1
        with pytest.raises(WeightsRejected, match="the log has no version 3"):
            await versions.find(3)
        await bus.publish(subject, encode(publish(3)))
        assert (await versions.find(3)).version == 3
        await bus.purge(subject, below=3)
        with pytest.raises(WeightsRejected, match="the log has no version 0"):
            await versions.find(0)
        await bus.publish(other, encode(publish(0)))
        assert (await PublishedVersions(bus, [subject, other]).find(0)).version == 0, "the first one stands there for good"


async def test_a_version_is_that_of_the_policy_whoever_wrote_onto_its_subjects() -> None:
    server, subject, other = MemoryServer(), Subjects("run").policy("default"), Subjects("run").policy("second")
    server.declare(plan_run("run", lanes=2))
    async with server.connect("run") as bus:
        versions = PublishedVersions(bus, [subject, other])
        await bus.publish(subject, encode(publish(1)))
        await bus.publish(subject, encode(replace(publish(1), policy="stranger", step=7)))
        await bus.publish(other, encode(replace(publish(1), step=8)))
        assert (await versions.find(1)).step == 1
        await bus.purge(subject, below=2)
        with pytest.raises(WeightsRejected, match="has no version 1"):
            await versions.find(1)


async def test_versions_of_a_log_that_went_back_in_time_are_found() -> None:
    """A new one, too, whose entry stands where the reader has been."""
    subject = Subjects("run").policy("default")
    servers = [MemoryServer(), MemoryServer()]
    for server, numbers in zip(servers, ((0, 1, 2, 3, 4, 5), (0, 1, 9)), strict=True):
        server.declare(plan_run("run", lanes=2))
        async with server.connect("run") as bus:
            for number in numbers:
                await bus.publish(subject, encode(publish(number)))
    async with servers[0].connect("run") as before, servers[1].connect("run") as after:
        versions = PublishedVersions(before, [subject])
        await versions.find(5)
        versions._bus = after
        with pytest.raises(WeightsRejected):
            await versions.find(9)
        assert (await versions.find(9)).version == 9


async def test_no_turn_is_answered_by_weights_that_a_failed_load_left_half_swapped() -> None:
    class Swapping(Engine):
        async def load(self, policy: PolicyPublished) -> None:
            await super().load(policy)
            if policy.version == 5:
                raise WeightsRejected("its answer was lost")

    engine, played = Swapping(), list[int]()
    sampler = SnapshotSampler(engine, find)
    await play(sampler, 3, played)
    with pytest.raises(VersionSuperseded):
        await play(sampler, 5, played)
    await play(sampler, 3, played)
    assert played == [3, 3] and engine.loads == [3, *[5] * TRIES, 3]


async def test_all_turns_that_wait_for_a_version_learn_together_that_it_is_gone() -> None:
    """One after another they would hold up the others for hours: a try may take a minute."""
    tried: list[int] = []

    async def fail(version: int) -> PolicyPublished:
        if version == 4:
            tried.append(version)
            await anyio.sleep(60)
            raise WeightsRejected("the store is away")
        return publish(version)

    gone: list[float] = []

    async def expect_gone() -> None:
        with pytest.raises(VersionSuperseded):
            await play(sampler, 4, [])
        gone.append(anyio.current_time())

    sampler, started = SnapshotSampler(Engine(), fail), anyio.current_time()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(expect_gone)
    assert len(tried) == TRIES and len(set(gone)) == 1
    assert gone[0] - started == pytest.approx(60 * TRIES + sum(PAUSES_SECONDS))


async def test_turns_of_the_loaded_version_go_on_while_the_store_of_another_is_away() -> None:
    arrived = anyio.Event()

    async def find_late(version: int) -> PolicyPublished:
        if version == 4:
            await arrived.wait()
        return publish(version)

    engine, played = Engine(), list[int]()
    sampler = SnapshotSampler(engine, find_late)
    async with anyio.create_task_group() as group:
        await play(sampler, 1, played)
        group.start_soon(play, sampler, 4, played)
        await anyio.sleep(0.5)
        with anyio.fail_after(5):
            for _ in range(3):
                await play(sampler, 1, played)
        arrived.set()
    assert played == [1, 1, 1, 1, 4] and engine.loads == [1, 4]


async def test_a_version_that_took_longer_to_load_than_its_turn_had_serves_the_next() -> None:
    class Slow(Engine):
        async def load(self, policy: PolicyPublished) -> None:
            await anyio.sleep(400)
            await super().load(policy)

    engine, played = Slow(), list[int]()
    sampler = SnapshotSampler(engine, find)
    with anyio.move_on_after(300) as limit:
        await play(sampler, 4, played)
    assert limit.cancelled_caught and not played
    with anyio.fail_after(5):
        await play(sampler, 4, played)
    assert engine.loads == [4]


async def test_copies_that_an_engine_rejected_are_discarded_before_the_next_try() -> None:
    class Damaged(Engine):
        async def load(self, policy: PolicyPublished) -> None:
            if not discarded:
                raise WeightsRejected("differs from the manifest's sha256")
            await super().load(policy)

    discarded, played = list[float](), list[int]()
    sampler = SnapshotSampler(Damaged(), find, lambda: discarded.append(anyio.current_time()))
    await play(sampler, 4, played)
    assert played == [4] and len(discarded) == 1


async def test_a_version_that_nobody_waits_for_any_more_is_not_loaded() -> None:
    engine, played = Engine(), list[int]()
    sampler = SnapshotSampler(engine, find)
    async with anyio.create_task_group() as group:
        await play(sampler, 1, played)
        group.start_soon(play, sampler, 1, played)
        await anyio.sleep(0.1)
        with anyio.move_on_after(0.5):
            await play(sampler, 4, played)
        await play(sampler, 1, played)
    assert played == [1, 1, 1] and engine.loads == [1]


@pytest.mark.parametrize("seed", range(5))
async def test_every_turn_ends_whatever_is_cancelled_slow_or_rejected(seed: int) -> None:
    draw = random.Random(seed)

    async def find_at_random(version: int) -> PolicyPublished:
        await anyio.sleep(draw.choice((0.0, 0.1, 5.0)))
        if draw.random() < 0.3:
            raise WeightsRejected("the store is away")
        return publish(version)

    class Odd(Engine):
        async def load(self, policy: PolicyPublished) -> None:
            await super().load(policy)
            if draw.random() < 0.2:
                raise WeightsRejected("damaged")

    async def play_at_random() -> None:
        await anyio.sleep(draw.uniform(0, 60))
        with anyio.move_on_after(draw.choice((0.5, 5.0, 500.0))) as limit:
            try:
                await play(sampler, draw.randrange(4), played)
            except VersionSuperseded:
                ended.append("gone")
        ended.append("late" if limit.cancelled_caught else "")

    sampler, played, ended = SnapshotSampler(Odd(), find_at_random), list[int](), list[str]()
    with anyio.fail_after(3600):
        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(play_at_random)
        for version in range(4):
            with suppress(VersionSuperseded):
                await play(sampler, version, played)
    assert len(played) > 60 and "late" in ended
