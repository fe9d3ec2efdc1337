"""Reading the log: in order, without gaps or repeats, to its end or live, and by subject."""

from __future__ import annotations

from typing import Any

import anyio
import pytest


async def fill(bus: Any, subjects: list[str], count: int) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(bus.publish, subjects[number % len(subjects)], b"%d" % number)


async def test_a_reader_begins_at_its_start_and_follows_live(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        await fill(bus, [subject], 5)
        async with bus.read([world.subjects.log], start=4) as reader:
            with anyio.fail_after(30):
                assert [(await reader.receive()).sequence for _ in range(2)] == [4, 5]
                await bus.publish(subject, b"live")
                entry = await reader.receive()
        assert (entry.sequence, entry.payload, entry.subject) == (6, b"live", subject)


async def test_a_reader_beyond_the_end_waits_for_its_start(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus, bus.read([world.subjects.log], start=4) as reader:
        await fill(bus, [subject], 5)
        with anyio.fail_after(30):
            assert [(await reader.receive()).sequence for _ in range(2)] == [4, 5]


async def test_a_reader_of_several_filters_sees_the_union_in_order(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        await fill(bus, [s.episode("a"), s.task("p", "a"), s.action("e0", "a"), s.episode("b")], 40)
        async with bus.read([s.episodes, s.actions()]) as reader:
            with anyio.fail_after(30):
                entries = [await reader.receive() for _ in range(30)]
    sequences = [entry.sequence for entry in entries]
    assert sequences == sorted(set(sequences))
    assert {entry.subject for entry in entries} == {s.episode("a"), s.episode("b"), s.action("e0", "a")}


async def test_more_entries_than_the_reader_holds_arrive_once_each(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        await fill(bus, [subject], 1500)
        async with bus.read([subject]) as reader:
            with anyio.fail_after(30):
                assert [(await reader.receive()).sequence for _ in range(1500)] == list(range(1, 1501))


async def test_a_cancelled_read_loses_nothing(world: Any) -> None:
    subject = world.subjects.episode("e1")
    seen: list[int] = []

    async def race(reader: Any, scope: anyio.CancelScope) -> None:
        with scope:
            seen.append((await reader.receive()).sequence)

    async with world.ready() as bus, bus.read([subject]) as reader:
        for number in range(150):
            scope = anyio.CancelScope()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(race, reader, scope)
                tasks.start_soon(bus.publish, subject, b"x")
                for _ in range(number % 12):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        with anyio.fail_after(30):
            while len(seen) < 150:
                seen.append((await reader.receive()).sequence)
    assert seen == list(range(1, 151))


async def test_a_scan_ends_at_what_was_the_end(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        await fill(bus, [s.episode("a")], 20)
        seen = []
        with anyio.fail_after(30):
            async for entry in bus.scan([s.log]):
                seen.append(entry.sequence)
                await bus.publish(s.episode("late"), b"x")
        assert seen == list(range(1, 21))
        assert (await bus.log_state()).last_sequence == 40


async def test_a_scan_ends_although_the_last_entries_do_not_match(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        await fill(bus, [s.episode("a")], 3)
        await fill(bus, [s.task("p", "a")], 3)
        with anyio.fail_after(30):
            assert [entry.sequence async for entry in bus.scan([s.episodes])] == [1, 2, 3]
            assert [entry.sequence async for entry in bus.scan([s.episodes], start=3)] == [3]
            assert [entry async for entry in bus.scan([s.episodes], start=4)] == []
            assert [entry async for entry in bus.scan([s.actions()])] == []
            assert [entry async for entry in bus.scan([s.log], start=7)] == []


@pytest.mark.integration
async def test_a_scan_by_several_filters_is_in_the_order_of_the_log_with_each_entry_once(world: Any) -> None:
    s = world.subjects
    wanted = [s.episode("a"), s.action("e0", "a"), s.episode("b")]
    async with world.ready() as bus:
        await fill(bus, [s.episode("a"), s.task("p", "a"), s.action("e0", "a"), s.episode("b")], 2400)
        with anyio.fail_after(50):
            entries = [entry async for entry in bus.scan([s.actions(), s.episodes, s.train("*")], start=5)]
            async for _ in bus.scan([s.episodes, s.actions()]):
                break  # who has enough leaves early
            assert [entry async for entry in bus.scan([s.train("*"), s.policy("*")])] == []
    sequences = [entry.sequence for entry in entries]
    assert sequences == sorted(set(sequences)) and sequences[0] >= 5 and len(sequences) >= 1796
    assert {entry.subject for entry in entries} == set(wanted)


async def test_a_scan_of_an_empty_log_is_empty(world: Any) -> None:
    async with world.ready() as bus:
        with anyio.fail_after(30):
            assert [entry async for entry in bus.scan([world.subjects.log])] == []


async def test_a_scan_of_a_trimmed_log_begins_where_it_begins(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        await fill(bus, [subject], 10)
        await world.purge(below=6)
        with anyio.fail_after(30):
            assert [entry.sequence async for entry in bus.scan([world.subjects.log])] == [6, 7, 8, 9, 10]


async def test_a_history_merges_its_subjects_by_sequence(world: Any) -> None:
    s = world.subjects
    mine = [s.observation("p", "any", "a"), s.action("e0", "a"), s.observation("p", "i0", "a")]
    async with world.ready() as bus:
        await fill(bus, [*mine, s.action("e0", "other")], 80)
        history = await bus.history([*mine, s.action("e9", "a"), mine[0]])
    sequences = [entry.sequence for entry in history]
    assert sequences == sorted(set(sequences))
    assert len(history) == 60
    assert {entry.subject for entry in history} == set(mine)


async def test_a_long_history_is_complete(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        await fill(bus, [s.episode("a"), s.episode("b")], 1400)
        one = await bus.history([s.episode("a")])
        both = await bus.history([s.episode("b"), s.episode("a")])
    assert len(one) == 700
    assert [entry.sequence for entry in both] == list(range(1, 1401))
    assert sorted(int(entry.payload) for entry in both) == list(range(1400))


async def test_a_history_of_large_entries_is_complete(world: Any) -> None:
    subject = world.subjects.episode("a")
    async with world.ready() as bus:
        for number in range(24):
            await bus.publish(subject, bytes([number]) * 700_000)
        history = await bus.history([subject])
    assert [entry.payload[0] for entry in history] == list(range(24))
    assert {len(entry.payload) for entry in history} == {700_000}


async def test_a_reader_sees_every_entry_once_across_a_break(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as steady, world.connect_by_line() as (bus, line), bus.read([subject]) as reader:
        await fill(steady, [subject], 10)
        with anyio.fail_after(30):
            seen = [(await reader.receive()).sequence for _ in range(5)]
            await line.cut()
            await fill(steady, [subject], 700)
            await line.mend()
            while len(seen) < 710:
                seen.append((await reader.receive()).sequence)
    assert seen == list(range(1, 711))
