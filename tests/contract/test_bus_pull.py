"""Pulling from the bus: leases, credits, sharing, and what a cancelled or leaving worker gives back."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.errors import BusError

LEASE_SECONDS = 1.0


async def fill(bus: Any, world: Any, count: int, pool: str = "long") -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(bus.publish, world.subjects.task(pool, f"e{number}"), b"%d" % number)


async def nothing_comes(subscription: Any, seconds: float) -> bool:
    with anyio.move_on_after(seconds):
        await subscription.receive()
        return False
    return True


@pytest.mark.integration
async def test_work_arrives_in_order_and_is_gone_once_acked(world: Any) -> None:
    async with world.ready() as bus:
        async with bus.pull("short", credits=10) as subscription:
            for number in range(3):
                await bus.publish(world.subjects.task("short", f"e{number}"), b"%d" % number)
            with anyio.fail_after(30):
                deliveries = [await subscription.receive() for _ in range(3)]
            assert [delivery.message.payload for delivery in deliveries] == [b"0", b"1", b"2"]
            assert [delivery.message.sequence for delivery in deliveries] == [1, 2, 3]
            assert [delivery.delivered for delivery in deliveries] == [1, 1, 1]
            assert abs(deliveries[0].message.time_ns - bus.now_ns()) < 30e9
            for delivery in deliveries:
                await delivery.ack()
            assert await nothing_comes(subscription, 1.5 * LEASE_SECONDS)


async def test_there_are_never_more_deliveries_than_credits(world: Any) -> None:
    async with world.ready() as bus:
        await fill(bus, world, 10)
        async with bus.pull("long", credits=3) as subscription:
            with anyio.fail_after(30):
                for left in (2, 1, 0):
                    await subscription.receive()
                    assert subscription.credits == left
            assert await nothing_comes(subscription, 0.2)
            subscription.grant()
            subscription.grant(2)
            assert subscription.credits == 3
            with anyio.fail_after(30):
                for _ in range(3):
                    await subscription.receive()
            assert await nothing_comes(subscription, 0.2)
            assert subscription.credits == 0


async def test_many_small_grants_bring_everything(world: Any) -> None:
    async with world.ready() as bus, bus.pull("long", credits=40) as subscription:
        await fill(bus, world, 200)
        seen = []
        with anyio.fail_after(30):
            while len(seen) < 200:
                delivery = await subscription.receive()
                await delivery.ack()
                subscription.grant()
                seen.append(delivery.message.sequence)
        assert sorted(seen) == list(range(1, 201))
        assert subscription.credits == 40


async def test_unacked_work_comes_again_after_its_lease(world: Any) -> None:
    async with world.ready() as bus, bus.pull("short", credits=2) as subscription:
        await fill(bus, world, 1, "short")
        with anyio.fail_after(30):
            first = await subscription.receive()
            again = await subscription.receive()
        assert (first.delivered, again.delivered) == (1, 2)
        assert again.message == first.message
        assert bus.now_ns() - first.message.time_ns > 0.8e9 * LEASE_SECONDS


async def test_the_work_of_a_silent_worker_goes_to_another(world: Any) -> None:
    async with world.ready() as one, world.connect() as other:
        await fill(one, world, 4, "short")
        async with one.pull("short", credits=4) as silent:
            with anyio.fail_after(30):
                for _ in range(4):
                    await silent.receive()
                async with other.pull("short", credits=4) as subscription:
                    taken = [await subscription.receive() for _ in range(4)]
        assert sorted(delivery.message.sequence for delivery in taken) == [1, 2, 3, 4]
        assert {delivery.delivered for delivery in taken} == {2}


@pytest.mark.integration
async def test_extending_keeps_a_lease_and_its_end_gives_the_work_away(world: Any) -> None:
    async with world.ready() as bus, bus.pull("short", credits=2) as subscription:
        await fill(bus, world, 1, "short")
        with anyio.fail_after(30):
            delivery = await subscription.receive()
            for _ in range(6):
                assert await nothing_comes(subscription, LEASE_SECONDS / 4)
                await delivery.extend()
            assert (await subscription.receive()).delivered == 2


async def test_naked_work_comes_again_at_once_or_after_the_delay(world: Any) -> None:
    async with world.ready() as bus, bus.pull("long", credits=3) as subscription:
        await fill(bus, world, 1)
        with anyio.fail_after(30):
            await (await subscription.receive()).nak()
            again = await subscription.receive()
            assert again.delivered == 2
            naked_at = anyio.current_time()
            await again.nak(0.5)
            assert (await subscription.receive()).delivered == 3
        assert anyio.current_time() - naked_at > 0.4


async def test_who_waits_already_gets_work_that_another_gave_back_for_later(world: Any) -> None:
    """Also when the one who gave it back takes nothing any more, and though nobody had a lease when the waiting began."""
    async with world.ready() as one, world.connect() as other:
        taken: list[Any] = []

        async def wait(started: Any) -> None:
            async with other.pull("long", credits=1) as subscription:
                started.set()
                taken.append(await subscription.receive())

        async with one.pull("long", credits=1) as giving:
            await fill(one, world, 1)
            delivery = await giving.receive()
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    started = anyio.Event()
                    group.start_soon(wait, started)
                    await started.wait()
                    await anyio.sleep(0.2)
                    await delivery.nak(0.3)
        assert [each.delivered for each in taken] == [2]


@pytest.mark.integration
async def test_who_waits_already_gets_work_whose_lease_another_lets_run_out(world: Any) -> None:
    async with world.ready() as one, world.connect() as other:
        taken: list[Any] = []

        async def wait(started: Any) -> None:
            async with other.pull("short", credits=1) as subscription:
                started.set()
                while not taken or taken[-1].delivered == 1:
                    taken.append(await subscription.receive())
                    subscription.grant(1)

        async with one.pull("short", credits=1) as silent:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    started = anyio.Event()
                    group.start_soon(wait, started)
                    await started.wait()
                    await anyio.sleep(0.2)
                    await fill(one, world, 2, "short")
                    await silent.receive()
        assert taken[-1].delivered == 2


async def test_two_workers_share_without_doubling(world: Any) -> None:
    seen: dict[str, list[int]] = {"one": [], "other": []}

    async def work(bus: Any, name: str, done: anyio.Event) -> None:
        async with bus.pull("long", credits=4) as subscription:
            while sum(map(len, seen.values())) < 60:
                with anyio.move_on_after(0.5):
                    delivery = await subscription.receive()
                    seen[name].append(delivery.message.sequence)
                    await delivery.ack()
                    subscription.grant()
        done.set()

    async with world.ready() as one, world.connect() as other:
        done = anyio.Event()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, one, "one", done)
                tasks.start_soon(work, other, "other", done)
                await anyio.lowlevel.checkpoint()
                await fill(one, world, 60)
                await done.wait()
    assert sorted(seen["one"] + seen["other"]) == list(range(1, 61))
    assert min(len(seen["one"]), len(seen["other"])) >= 10


async def test_a_leaving_worker_hands_back_what_it_did_not_take(world: Any) -> None:
    async with world.ready() as one, world.connect() as other:
        await fill(one, world, 5)
        with anyio.fail_after(30):
            async with one.pull("long", credits=5) as subscription:
                held = await subscription.receive()
            async with other.pull("long", credits=5) as subscription:
                taken = [(await subscription.receive()).message.sequence for _ in range(4)]
                assert await nothing_comes(subscription, 0.2)
        assert sorted([held.message.sequence, *taken]) == [1, 2, 3, 4, 5]


@pytest.mark.integration
async def test_work_taken_before_leaving_can_still_be_acked(world: Any) -> None:
    async with world.ready() as bus:
        await fill(bus, world, 1, "short")
        with anyio.fail_after(30):
            async with bus.pull("short", credits=1) as subscription:
                held = await subscription.receive()
            await held.ack()
            async with bus.pull("short", credits=1) as subscription:
                assert await nothing_comes(subscription, 1.5 * LEASE_SECONDS)


async def test_a_consumer_that_does_not_exist_is_named(world: Any) -> None:
    async with world.ready() as bus, bus.pull("nobody", credits=1) as subscription:
        with anyio.fail_after(30), pytest.raises(BusError, match="consumer nobody"):
            await subscription.receive()


async def test_a_cancelled_receive_loses_nothing(world: Any) -> None:
    """Messages are published just as the receive that waits for them is cancelled, but for every twelfth."""
    seen: list[int] = []

    async def race(subscription: Any, scope: anyio.CancelScope) -> None:
        with scope:
            seen.append((await subscription.receive()).message.sequence)

    async with world.ready() as bus, bus.pull("long", credits=300) as subscription:
        cancelled = 0
        for number in range(200):
            scope = anyio.CancelScope()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(race, subscription, scope)
                tasks.start_soon(bus.publish, world.subjects.task("long", f"e{number}"), b"x")
                for _ in range(number % 12):
                    await anyio.lowlevel.checkpoint()
                if number % 12 < 11:
                    scope.cancel()
            cancelled += scope.cancelled_caught
        with anyio.fail_after(30):
            while len(seen) < 200:
                seen.append((await subscription.receive()).message.sequence)
        assert await nothing_comes(subscription, 0.1)
        assert 0 < cancelled < 200
    assert seen == list(range(1, 201))


async def test_after_a_break_the_remaining_credits_are_asked_for_again(world: Any) -> None:
    async with world.ready() as steady, world.connect_by_line() as (bus, line), bus.pull("long", credits=4) as subscription:
        await fill(steady, world, 1)
        with anyio.fail_after(30):
            await subscription.receive()
            await line.cut()
            await fill(steady, world, 8)
            await line.mend()
            for _ in range(3):
                await subscription.receive()
            assert await nothing_comes(subscription, 0.3)
            assert subscription.credits == 0


async def test_acks_while_cut_off_do_not_raise_and_the_work_comes_again(world: Any) -> None:
    async with world.ready() as steady, world.connect_by_line() as (bus, line), bus.pull("short", credits=2) as subscription:
        await fill(steady, world, 1, "short")
        with anyio.fail_after(30):
            delivery = await subscription.receive()
            await line.cut()
            await delivery.extend()
            await delivery.nak(1.0)
            await delivery.ack()
            await line.mend()
            assert (await subscription.receive()).message == delivery.message
