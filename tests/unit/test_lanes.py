"""A lane is kept through lost answers and absent servers, and lost only to another worker."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.streams import environment_lanes, plan_run
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus.delivery.lanes import LEASE_SECONDS, RENEWED_SECONDS, Lane, LaneLost, LanesUnread, NoLaneFree, claim_lane
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus_schemas import Heartbeat, LaneLease, Subjects, encode
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("r")

anyio_backend = virtual_time


class LostAnswers(Faults):
    lost = False

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return PublishFault(lost="answer") if self.lost else NO_PUBLISH_FAULT


class LostFirstAnswer(Faults):
    first = True

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        self.first, lost = False, self.first
        return PublishFault(lost="answer") if lost else NO_PUBLISH_FAULT


async def claimed(bus: MemoryBus, worker: str = "w", wait_seconds: float = 30.0) -> Lane:
    return await claim_lane(
        bus, SUBJECTS, role="environment", names=("e0",), worker=worker, nonce=worker, wait_seconds=wait_seconds
    )


async def test_a_renewal_whose_answer_was_lost_and_then_the_server_too_ends_nobody() -> None:
    faults = LostAnswers()
    server = MemoryServer(faults=faults)
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus)
        faults.lost = True
        await lane.renew(bus)
        faults.lost = False
        last = bus.last

        async def dies(subject: str) -> Any:
            server.kill()
            return await last(subject)

        bus.last = dies  # type: ignore[method-assign]
        with anyio.fail_after(LEASE_SECONDS):
            await lane.renew(bus)
        bus.last = last  # type: ignore[method-assign]
        server.restart()
        await lane.renew(bus)
        await lane.renew(bus)


async def test_the_lane_of_a_worker_that_died_before_the_servers_clock_was_set_back_is_free_after_its_lease() -> None:
    """It was held for as many hours as the clock was ahead."""
    server = MemoryServer()
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        await claimed(bus, "dead")
        server.step_clock(-5 * 3600)
        began = anyio.current_time()
        lane = await claimed(bus, "next")
        assert LEASE_SECONDS < anyio.current_time() - began < LEASE_SECONDS + 2.5
        await lane.renew(bus)


async def test_the_lane_of_a_living_worker_stays_its_own_after_the_servers_clock_was_set_back() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus, "living")
        server.step_clock(-5 * 3600)

        async def keep() -> None:
            while True:
                await anyio.sleep(HEARTBEAT_SECONDS)
                await lane.renew(bus)

        tasks.start_soon(keep)
        with pytest.raises(NoLaneFree):
            await claimed(bus, "next")
        tasks.cancel_scope.cancel()


async def test_the_lane_of_a_living_worker_stays_its_own_after_the_servers_clock_was_set_forward() -> None:
    """Who joined before its next renewal found a lease that had run out hours ago."""
    server = MemoryServer()
    async with server.connect("r") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus, "living")

        async def keep() -> None:
            while True:
                await anyio.sleep(HEARTBEAT_SECONDS)
                await lane.renew(bus)

        tasks.start_soon(keep)
        await anyio.sleep(HEARTBEAT_SECONDS + 0.1)
        server.step_clock(5 * 3600)
        with pytest.raises(NoLaneFree):
            await claimed(bus, "next")
        tasks.cancel_scope.cancel()


async def test_the_lane_of_a_worker_that_is_gone_is_free_after_a_look_of_a_few_seconds_and_another_at_once() -> None:
    async with MemoryServer().connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        await claimed(bus, "gone")
        await anyio.sleep(LEASE_SECONDS + 1)
        began = anyio.current_time()
        other = await claim_lane(bus, SUBJECTS, role="environment", names=("e0", "e1"), worker="b", nonce="b")
        assert other.name == "e1" and anyio.current_time() - began < 0.5
        assert (await claimed(bus, "next")).name == "e0"
        assert anyio.current_time() - began < RENEWED_SECONDS + 2


async def test_a_lane_that_another_worker_has_is_lost() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus)
        await anyio.sleep(LEASE_SECONDS + 1)
        await claimed(bus, "other")
        with pytest.raises(LaneLost):
            await lane.renew(bus)


async def test_a_worker_whose_renewals_the_log_has_lost_begins_anew() -> None:
    """As after a loss of power: positions that it knows are given again, and its claims may stand on those of others."""
    async with MemoryServer().connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus)
        lane.sequence += 3
        with pytest.raises(LaneLost, match="went back in time"):
            await lane.renew(bus)


async def test_a_lease_that_cannot_be_read_is_no_lease() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        await bus.publish(SUBJECTS.lane("environment", "e0"), b"not a lease")
        lane = await claimed(bus)
        assert lane.sequence == 2
        await lane.release(bus)
        free = await bus.last(SUBJECTS.lane("environment", "e0"))
        assert free is not None
        assert free.payload == encode(LaneLease(worker="", nonce="", lease_seconds=0))


async def test_a_claim_whose_answer_was_lost_is_one_s_own_at_the_next_look() -> None:
    faults = LostFirstAnswer()
    async with MemoryServer(faults=faults).connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus, wait_seconds=LEASE_SECONDS - 1)  # its own lease would stand in its way for longer
        assert not faults.first
        await lane.renew(bus)


async def test_a_server_that_says_nothing_of_lanes_is_not_taken_for_one_whose_lanes_are_held() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        server.kill()
        with pytest.raises(LanesUnread, match="did not say within 30 s which environment lanes are free"):
            await claimed(bus)


async def test_a_lane_that_was_held_before_the_server_said_nothing_more_may_be_free_by_now() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus, server.connect("r", worker="other") as other, anyio.create_task_group() as group:
        await bus.declare(plan_run("r", lanes=1))
        await claimed(other, "other")

        async def kill() -> None:
            await anyio.sleep(LEASE_SECONDS / 2)
            server.kill()

        group.start_soon(kill)
        with pytest.raises(LanesUnread):
            await claimed(bus, wait_seconds=LEASE_SECONDS - 1)


async def test_a_worker_that_is_ended_while_it_says_hello_leaves_its_lane_free() -> None:
    server = MemoryServer()
    async with server.connect("r") as bus, server.connect("r", worker="other") as other:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus)
        lifecycle = WorkerLifecycle(
            bus, SUBJECTS, role="environment", worker="w", beat=lambda: Heartbeat(role="environment", worker="w"), lane=lane
        )
        greeted = anyio.Event()

        async def hello(**_: Any) -> None:
            greeted.set()
            await anyio.sleep_forever()

        lifecycle.publish_started = hello  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:

            async def work() -> None:
                async with run_lifecycle(lifecycle, bus, lane, slots=1):
                    raise AssertionError("it never got so far")

            group.start_soon(work)
            await greeted.wait()
            group.cancel_scope.cancel()
        await claimed(other, "other", wait_seconds=LEASE_SECONDS / 2)


async def test_a_renewal_without_an_answer_does_not_silence_the_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say that the server stores nothing: at `ANSWER_SECONDS` a renewal every second one would come too late."""
    server = MemoryServer()
    async with server.connect("r") as bus, server.connect("r", worker="other") as other:
        await bus.declare(plan_run("r", lanes=1))
        lane = await claimed(bus)

        async def renew(*_: object) -> None:
            await anyio.sleep_forever()

        monkeypatch.setattr(Lane, "renew", renew)
        beat = Heartbeat(role="environment", worker="w")
        lifecycle = WorkerLifecycle(bus, SUBJECTS, role="environment", worker="w", beat=lambda: beat, lane=lane)
        async with other.listen(SUBJECTS.heartbeats) as listener, run_lifecycle(lifecycle, bus, lane, slots=1):
            with anyio.fail_after(3.5 * HEARTBEAT_SECONDS):
                for _ in range(4):
                    await listener.receive()


class CountedCalls:
    """A bus that counts what claiming a lane asks of the server."""

    def __init__(self, bus: Any, counts: Counter[str]) -> None:
        self._bus = bus
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            self._counts[name] += 1
            await anyio.sleep(0.005)
            return await getattr(self._bus, name)(*args, **options)

        return call if name in ("last", "publish") else getattr(self._bus, name)


@pytest.mark.integration
async def test_a_thousand_workers_that_start_at_the_same_moment_have_lanes_after_calls_in_proportion_to_them() -> None:
    """In virtual time, on 1,100 lanes; in the order of the lanes it took 500,500 reads and as many writes."""
    workers, counts = 1000, Counter[str]()
    lanes = environment_lanes(1100)
    claimed_lanes: list[str] = []
    async with MemoryServer().connect("r") as bus, anyio.create_task_group() as group:
        await bus.declare(plan_run("r", lanes=1))

        async def start(worker: str) -> None:
            counted = cast(Bus, CountedCalls(bus, counts))
            lane = await claim_lane(counted, SUBJECTS, role="environment", names=lanes, worker=worker, nonce=worker)
            claimed_lanes.append(lane.name)

        started = anyio.current_time()
        for number in range(workers):
            group.start_soon(start, f"w{number}")
        while len(claimed_lanes) < workers:
            await anyio.sleep(0.1)
            assert anyio.current_time() - started < 10
    assert len(set(claimed_lanes)) == workers
    assert counts["last"] < 8 * workers
    assert counts["publish"] < 4 * workers


async def test_few_lanes_are_taken_in_their_order() -> None:
    async with MemoryServer().connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        names = environment_lanes(16)
        taken = [
            await claim_lane(bus, SUBJECTS, role="environment", names=names, worker=worker, nonce=worker) for worker in "abc"
        ]
    assert [lane.name for lane in taken] == ["e0", "e1", "e2"]
