"""Survival of a kill -9 of the server, and `declare` over what exists."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.errors import PublishUnanswered, RequestUnanswered, UserError


async def test_declaring_again_is_harmless(world: Any) -> None:
    async with world.ready() as bus:
        await bus.publish(world.subjects.episode("e1"), b"x")
        await bus.declare(world.plan())
        async with world.connect() as other:
            await other.declare(world.plan())
        assert (await bus.log_state()).last_sequence == 1


async def test_two_who_declare_at_once_agree(world: Any) -> None:
    async with world.connect() as one, world.connect() as other, anyio.create_task_group() as tasks:
        tasks.start_soon(one.declare, world.plan())
        tasks.start_soon(other.declare, world.plan())


async def test_what_exists_differently_is_named_and_left_alone(world: Any) -> None:
    async with world.ready(max_bytes=1 << 20) as bus:
        with pytest.raises(UserError, match="max_bytes"):
            await bus.declare(world.plan(max_bytes=1 << 19))
        assert (await bus.log_state()).limit_bytes == 1 << 20
        plan = world.plan(max_bytes=1 << 20)
        slower = msgspec.structs.replace(plan.consumers[0], ack_wait_seconds=9.0)
        with pytest.raises(UserError, match=r"consumer short.*ack_wait"):
            await bus.declare(msgspec.structs.replace(plan, consumers=(slower,)))


async def test_more_consumers_than_a_stream_may_have_are_refused(world: Any) -> None:
    async with world.connect() as bus:
        plan = world.plan()
        few = msgspec.structs.replace(plan, log=msgspec.structs.replace(plan.log, max_consumers=1))
        with pytest.raises(UserError, match=r"maximum consumers limit reached.*declare fewer lanes"):
            await bus.declare(few)


@pytest.mark.integration
async def test_a_publish_waits_for_the_server_to_come_back(world: Any) -> None:
    async with world.ready() as bus:
        await bus.publish(world.subjects.episode("before"), b"x")
        await world.kill_server()
        with anyio.fail_after(30), pytest.raises(PublishUnanswered):
            await bus.publish(world.subjects.episode("e0"), b"x", timeout=0.2)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for number in range(300):
                    tasks.start_soon(bus.publish, world.subjects.episode(f"e{number + 1}"), b"x")
                await world.restart_server()
        entries = [entry.subject async for entry in bus.scan([world.subjects.log])]
        assert len(entries) == len(set(entries))
        assert {world.subjects.episode(f"e{number + 1}") for number in range(300)} <= set(entries)


@pytest.mark.integration
async def test_a_purge_is_not_kept_for_a_server_that_comes_back(world: Any) -> None:
    """Its log may be an older one, in which other entries have these sequences."""
    async with world.ready() as bus:
        for episode in ("a", "b"):
            await bus.publish(world.subjects.episode(episode), b"x")
        await world.kill_server()
        with anyio.fail_after(30), pytest.raises(PublishUnanswered):  # by then the client knows
            await bus.publish(world.subjects.episode("c"), b"x", timeout=0.2)
        async with anyio.create_task_group() as tasks:

            async def purge() -> None:
                with anyio.fail_after(60), pytest.raises(RequestUnanswered):
                    await bus.purge(world.subjects.episodes, below=3)

            tasks.start_soon(purge)
            await anyio.sleep(0.1)
            await world.restart_server()
        assert [entry.sequence async for entry in bus.scan([world.subjects.log])][:2] == [1, 2]
        await bus.purge(world.subjects.episodes, below=2)
        assert [entry.sequence async for entry in bus.scan([world.subjects.log])][:1] == [2]


@pytest.mark.integration
async def test_publishes_under_way_at_a_kill_are_stored_once_each(world: Any) -> None:
    async with world.ready() as bus:

        async def publish_many(worker: int) -> None:
            for number in range(60):
                await bus.publish(world.subjects.episode(f"e{worker}-{number}"), bytes(300))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for worker in range(8):
                    tasks.start_soon(publish_many, worker)
                while (await bus.log_state()).last_sequence < 50:
                    await anyio.lowlevel.checkpoint()
                await world.kill_server()
                await world.restart_server()
        subjects = [entry.subject async for entry in bus.scan([world.subjects.log])]
        assert (len(subjects), len(set(subjects))) == (480, 480)


@pytest.mark.integration
async def test_a_reader_sees_every_entry_once_across_a_kill(world: Any) -> None:
    async with world.ready() as bus, bus.read([world.subjects.episodes]) as reader:
        seen = []

        async def publish() -> None:
            for number in range(600):
                await bus.publish(world.subjects.episode(f"e{number}"), b"%d" % number)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                while len(seen) < 600:
                    seen.append(await reader.receive())
                    if len(seen) in (200, 400):
                        await world.kill_server()
                        await world.restart_server()
    assert [entry.sequence for entry in seen] == list(range(1, 601))
    assert [entry.payload for entry in seen] == [b"%d" % number for number in range(600)]


async def test_acks_that_a_killed_server_forgot_mean_redelivery_and_never_loss(world: Any) -> None:
    async with world.ready() as bus:
        for number in range(100):
            await bus.publish(world.subjects.task("short", f"e{number}"), b"x")
        acked, seen_again = set(), set()
        with anyio.fail_after(30):
            async with bus.pull("short", credits=100) as subscription:
                for number in range(100):
                    delivery = await subscription.receive()
                    if number % 2:
                        await delivery.ack()
                        acked.add(delivery.message.sequence)
                await world.kill_server()
                await world.restart_server()
                unacked = set(range(1, 101)) - acked
                subscription.grant(200)
                while not unacked <= seen_again:
                    delivery = await subscription.receive()
                    seen_again.add(delivery.message.sequence)
                    await delivery.ack()
                    subscription.grant()
        assert len(acked) == 50


@pytest.mark.integration
async def test_a_pull_goes_on_after_a_kill_with_its_remaining_credits(world: Any) -> None:
    async with world.ready() as bus, bus.pull("long", credits=5) as subscription:
        await world.kill_server()
        await world.restart_server()
        with anyio.fail_after(30):
            for number in range(9):
                await bus.publish(world.subjects.task("long", f"e{number}"), b"x")
            for _ in range(5):
                await subscription.receive()
            with anyio.move_on_after(0.3) as waiting:
                await subscription.receive()
        assert waiting.cancelled_caught
        assert subscription.credits == 0


async def test_compare_and_set_holds_across_a_kill(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        first = await bus.publish(subject, b"one", expected_last=0)
        await world.kill_server()
        await world.restart_server()
        with anyio.fail_after(30):
            second = await bus.publish(subject, b"two", expected_last=first.sequence)
            assert (await bus.last(subject)).sequence == second.sequence
            assert second.sequence == first.sequence + 1
