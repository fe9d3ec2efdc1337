"""Storing on the bus: order, compare-and-set, duplicates, limits, lost answers."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.errors import BusError, LogFull, PublishUnanswered, SequenceConflict, UserError
from fleetbus_schemas import MAX_MESSAGE_BYTES


async def test_entries_are_numbered_in_order_and_read_back(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        assert (await bus.log_state()).last_sequence == 0
        assert await bus.last(subject) is None
        before = bus.now_ns()
        first = await bus.publish(subject, b"one")
        second = await bus.publish(subject, b"two")
        stored = await bus.last(subject)
        assert (first.sequence, second.sequence) == (1, 2)
        assert (stored.subject, stored.payload, stored.sequence) == (subject, b"two", 2)
        assert before - 50_000_000 <= stored.time_ns <= bus.now_ns() + 50_000_000
        assert (await bus.log_state()).last_sequence == 2


async def test_compare_and_set_stores_once_and_refuses_the_second(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        await bus.publish(world.subjects.episode("other"), b"x")
        first = await bus.publish(subject, b"one", expected_last=0)
        with pytest.raises(SequenceConflict) as refused:
            await bus.publish(subject, b"two", expected_last=0)
        assert (refused.value.subject, refused.value.expected) == (subject, 0)
        await bus.publish(subject, b"three", expected_last=first.sequence)
        assert [entry.payload for entry in await bus.history([subject])] == [b"one", b"three"]


async def test_of_many_who_expect_the_same_entry_exactly_one_wins(world: Any) -> None:
    subject = world.subjects.episode("e1")
    outcomes: list[bool] = []

    async def claim(bus: Any, number: int) -> None:
        try:
            await bus.publish(subject, b"%d" % number, expected_last=0)
        except SequenceConflict:
            outcomes.append(False)
        else:
            outcomes.append(True)

    async with world.ready() as one, world.connect() as other, anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(claim, (one, other)[number % 2], number)
    assert sorted(outcomes) == [False] * 39 + [True]


async def test_a_repeated_id_stores_nothing_new(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        first = await bus.publish(subject, b"one", message_id="m1")
        again = await bus.publish(subject, b"changed", message_id="m1")
        assert (again.sequence, again.duplicate, first.duplicate) == (first.sequence, True, False)
        assert [entry.payload for entry in await bus.history([subject])] == [b"one"]


async def test_the_largest_message_fits_with_its_headers(world: Any) -> None:
    subject = world.subjects.episode("e" * 64)
    payload = bytes(MAX_MESSAGE_BYTES)
    async with world.ready() as bus:
        await bus.publish(subject, payload, message_id="m" * 128, expected_last=0)
        assert len((await bus.last(subject)).payload) == MAX_MESSAGE_BYTES


async def test_messages_without_an_id_are_never_taken_for_duplicates(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as one, world.connect() as other:
        for bus in (one, one, other, other):
            assert not (await bus.publish(subject, b"same")).duplicate
        assert (await one.log_state()).last_sequence == 4


async def test_an_id_is_forgotten_after_the_duplicate_window(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready(duplicate_window_seconds=0.2) as bus:
        await bus.publish(subject, b"one", message_id="m1")
        with anyio.fail_after(30):
            while (await bus.publish(subject, b"one", message_id="m1")).duplicate:  # noqa: ASYNC110  # only time helps
                await anyio.sleep(0.02)
        assert (await bus.log_state()).last_sequence == 2


async def test_the_id_of_a_refused_message_is_not_remembered(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        with pytest.raises(SequenceConflict):
            await bus.publish(subject, b"one", message_id="m1", expected_last=7)
        assert not (await bus.publish(subject, b"one", message_id="m1", expected_last=0)).duplicate


async def test_compare_and_set_is_checked_before_the_id(world: Any) -> None:
    """So a conflict after a resend may be one's own first try, and the caller has to read back."""
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        first = await bus.publish(subject, b"one", message_id="m1", expected_last=0)
        with pytest.raises(SequenceConflict):
            await bus.publish(subject, b"one", message_id="m1", expected_last=0)
        assert (await bus.publish(subject, b"one", message_id="m1", expected_last=first.sequence)).duplicate


async def test_a_full_log_refuses_until_there_is_room(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready(max_bytes=20_000) as bus:
        stored = 0
        with pytest.raises(LogFull):
            for stored in range(100):
                await bus.publish(subject, bytes(1000), message_id=f"m{stored}")
        assert 10 <= stored <= 20
        assert (await bus.log_state()).last_sequence == stored
        with pytest.raises(LogFull):
            await bus.publish(subject, bytes(1000), message_id=f"m{stored}")
        assert (await bus.publish(subject, bytes(1000), message_id="m0")).duplicate
        state = await bus.log_state()
        assert 15_000 < state.used_bytes <= state.limit_bytes == 20_000
        await world.purge(below=6)
        assert not (await bus.publish(subject, bytes(1000), message_id=f"m{stored}")).duplicate
        assert (await bus.history([subject]))[0].sequence == 6


async def test_a_full_log_takes_more_once_it_is_declared_with_a_higher_limit_and_never_shrinks(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready(max_bytes=20_000) as bus:
        with pytest.raises(LogFull):
            for _ in range(100):
                await bus.publish(subject, bytes(1000))
        await bus.declare(world.plan(max_bytes=40_000))
        await bus.publish(subject, bytes(1000))
        with pytest.raises(UserError, match="max_bytes"):
            await bus.declare(world.plan(max_bytes=20_000))
        assert (await bus.log_state()).limit_bytes == 40_000


async def test_a_stream_of_last_values_keeps_one_entry_per_subject(world: Any) -> None:
    one, two = world.subjects.lane("inference", "i0"), world.subjects.lane("inference", "i1")
    async with world.ready() as bus:
        held = await bus.publish(one, b"a", expected_last=0)
        await bus.publish(two, b"b", expected_last=0)
        await bus.publish(one, b"c", expected_last=held.sequence)
        assert [entry.payload for entry in await bus.history([one, two])] == [b"b", b"c"]
        assert [entry.payload async for entry in bus.scan([world.subjects.lanes])] == [b"b", b"c"]
        with pytest.raises(SequenceConflict):
            await bus.publish(one, b"d", expected_last=held.sequence)


async def test_what_no_stream_stores_is_an_error_that_names_the_subject(world: Any) -> None:
    async with world.ready() as bus:
        with pytest.raises(BusError, match=r"fbrpc\..*no stream stores"):
            await bus.publish(world.subjects.rpc("w", "s"), b"x")


async def test_a_message_beyond_the_limit_is_refused_here_and_harms_nothing(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as bus:
        for size in (1 << 20, (1 << 20) + 1):  # the headers count, too
            with pytest.raises(BusError, match="exceed"):
                await bus.publish(subject, bytes(size))
        largest = bytes((1 << 20) - 1024)
        assert (await bus.publish(subject, largest)).sequence == 1
        assert (await bus.last(subject)).payload == largest


async def test_more_publishes_than_the_window_are_all_stored_once(world: Any) -> None:
    async with world.ready() as bus:
        async with anyio.create_task_group() as tasks:
            for number in range(700):
                tasks.start_soon(bus.publish, world.subjects.episode(f"e{number}"), b"x")
        assert (await bus.log_state()).last_sequence == 700


async def test_an_unanswered_publish_says_so_and_can_be_read_back(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready(), world.connect_by_line() as (bus, line):
        await line.hold_answers()
        with anyio.fail_after(30), pytest.raises(PublishUnanswered):
            await bus.publish(subject, b"one", expected_last=0, timeout=0.3)
        await line.cut()
        await line.mend()
        with anyio.fail_after(30):
            stored = await bus.last(subject)
        assert stored.payload == b"one"
        with pytest.raises(SequenceConflict):
            await bus.publish(subject, b"one", expected_last=0)


async def test_a_publish_whose_answer_was_lost_is_sent_again_under_the_same_id(world: Any) -> None:
    subject = world.subjects.episode("e1")
    async with world.ready() as watching, world.connect_by_line() as (bus, line), watching.read([subject]) as reader:
        await line.hold_answers()
        results = []

        async def publish() -> None:
            results.append(await bus.publish(subject, b"one"))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                assert (await reader.receive()).sequence == 1
                await line.cut()
                await line.mend()
        assert (results[0].sequence, results[0].duplicate) == (1, True)
        assert (await watching.log_state()).last_sequence == 1


async def test_a_cancelled_publish_ends_at_once_and_the_next_one_works(world: Any) -> None:
    async with world.ready() as watching, world.connect_by_line() as (bus, line):
        await line.hold_answers()
        with anyio.fail_after(30):
            with anyio.move_on_after(0.1) as scope:
                await bus.publish(world.subjects.episode("e1"), b"one")
            assert scope.cancelled_caught
        await line.cut()
        await line.mend()
        with anyio.fail_after(30):
            published = await bus.publish(world.subjects.episode("e2"), b"two")
        assert published.sequence == (await watching.log_state()).last_sequence <= 2


async def test_the_clock_never_steps_back(world: Any) -> None:
    async with world.ready() as bus:
        last = 0
        for _ in range(200):
            now = bus.now_ns()
            assert now >= last
            last = now
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("name", ["*", ">", "", "a."])
async def test_nothing_is_published_on_a_subject_that_is_everybodys(world: Any, name: str) -> None:
    async with world.ready() as bus:
        with pytest.raises(BusError, match="wildcard or an empty token"):
            await bus.publish(f"{world.subjects.session('x')[:-1]}{name}", b"x")
        assert (await bus.log_state()).last_sequence == 0
