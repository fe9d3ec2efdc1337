"""Trimming: floors of consumers, the next entry on a subject, and the removal of entries by subject and sequence."""

from __future__ import annotations

from typing import Any

import anyio


async def test_a_purge_removes_its_subject_below_its_sequence_and_nothing_else(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        for number in range(12):
            await bus.publish([s.observation("p", "any", "a"), s.action("e0", "a"), s.episode("a")][number % 3], b"%d" % number)
        await bus.purge(s.observations(), below=7)
        left = [entry.sequence async for entry in bus.scan([s.log])]
        assert left == [2, 3, 5, 6, 7, 8, 9, 10, 11, 12], "an observation stands at 7 itself"
        assert [entry.sequence for entry in await bus.history([s.observation("p", "any", "a")])] == [7, 10]
        assert (await bus.publish(s.episode("b"), b"x")).sequence == 13


async def test_the_next_entry_is_the_first_match_from_a_sequence_on(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        for number in range(6):
            await bus.publish(s.task("p", f"e{number % 2}"), b"%d" % number)
        found = await bus.next_entry(s.task("*", "e1"), start=3)
        assert found is not None
        assert (found.sequence, found.subject, found.payload) == (4, s.task("p", "e1"), b"3")
        assert await bus.next_entry(s.tasks(), start=7) is None
        assert await bus.next_entry(s.episodes, start=1) is None


async def test_the_floor_of_a_consumer_stands_before_what_is_held_and_stands_still_while_idle(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        assert {floor.name: (floor.filter, floor.ack_floor) for floor in await bus.ack_floors()} == {
            "short": (s.tasks("short"), 0),
            "long": (s.tasks("long"), 0),
        }
        for number in range(4):
            await bus.publish(s.task("long", f"e{number}"), b"x")
        async with bus.pull("long", credits=4) as subscription:
            with anyio.fail_after(30):
                deliveries = [await subscription.receive() for _ in range(4)]
                await deliveries[0].ack()
                await deliveries[3].ack()
                floors = {"long": 0}
                while floors["long"] == 0:  # acks are not confirmed
                    floors = {floor.name: floor.ack_floor for floor in await bus.ack_floors()}
                assert [(each.name, each.ack_floor) for each in await bus.ack_floors(["short", "long"])] == [
                    ("short", 0),
                    ("long", 1),
                ]
        assert floors == {"short": 0, "long": 1}


async def test_the_backlog_of_a_consumer_counts_what_nobody_acked_delivered_or_not(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        for number in range(4):
            await bus.publish(s.task("long", f"e{number}"), b"x")
        await bus.publish(s.task("short", "e"), b"x")
        async with bus.pull("long", credits=3) as subscription:
            with anyio.fail_after(30):
                deliveries = [await subscription.receive() for _ in range(3)]
                assert (await bus.log_state(["long"])).unacked == 4
                await deliveries[1].ack()
                await deliveries[2].nak(60.0)
                while (found := await bus.log_state(["long"])).unacked == 4:  # acks are not confirmed
                    pass
        assert found.unacked == 3
        assert found.entries == 5
        assert found.last_sequence == 5
        assert found.used_bytes > 5 and found.limit_bytes == 0
        assert (await bus.log_state()).unacked == 0
        assert found.created == (await bus.log_state()).created


async def test_the_duplicate_window_is_the_one_that_was_declared(world: Any) -> None:
    async with world.ready(duplicate_window_seconds=7.0) as bus:
        assert (await bus.log_state()).duplicate_window_seconds == 7.0
