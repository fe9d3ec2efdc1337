"""The last entries on several subjects from one state of the log, and which subjects it has."""

from __future__ import annotations

from typing import Any

import anyio
import pytest


async def test_the_last_of_each_subject_is_given_and_subjects_without_entries_are_missing(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        assert await bus.last_of_each((s.floor, s.episode("a"))) == []
        for number in range(6):
            await bus.publish([s.floor, s.episode("a"), s.episode("b")][number % 3], b"%d" % number)
        found = await bus.last_of_each((s.floor, s.episode("a"), s.episode("never")))
        assert {entry.subject: (entry.sequence, entry.payload) for entry in found} == {
            s.floor: (4, b"3"),
            s.episode("a"): (5, b"4"),
        }
        await bus.purge(s.episode("a"), below=6)
        assert [entry.subject for entry in await bus.last_of_each((s.floor, s.episode("a")))] == [s.floor]


@pytest.mark.integration
async def test_the_last_of_each_subject_is_given_however_much_they_are_together(world: Any) -> None:
    """A server sends 64 MiB at most for one question, and a slow line no more than some MiB in time."""
    s = world.subjects
    names = [s.episode(f"e{number}") for number in range(70)]
    async with world.ready() as bus:
        for name in names:
            await bus.publish(name, bytes(1_000_000))
        found = await bus.last_of_each(names)
        assert [(entry.subject, entry.sequence) for entry in found] == [(name, place + 1) for place, name in enumerate(names)]


async def test_the_last_of_each_subject_are_of_one_state_of_the_log_while_more_is_stored(world: Any) -> None:
    s = world.subjects
    names = [s.episode(f"e{number}") for number in range(40)]

    async def store_in_turn(bus: Any) -> None:
        while True:
            for name in names:
                await bus.publish(name, bytes(100_000))

    async with world.ready() as bus, anyio.create_task_group() as tasks:
        for name in names:
            await bus.publish(name, bytes(100_000))
        tasks.start_soon(store_in_turn, bus)
        for _ in range(5):
            found = sorted(entry.sequence for entry in await bus.last_of_each(names))
            assert found == list(range(found[-1] - len(names) + 1, found[-1] + 1))
        tasks.cancel_scope.cancel()


async def test_subjects_are_listed_while_they_have_entries(world: Any) -> None:
    s = world.subjects
    async with world.ready() as bus:
        assert await bus.list_subjects(s.session("*")) == []
        for name in ("a", "b", "a"):
            await bus.publish(s.session(name), b"x")
        await bus.publish(s.episode("a"), b"x")
        assert sorted(await bus.list_subjects(s.session("*"))) == [s.session("a"), s.session("b")]
        await bus.purge(s.session("a"), below=4)
        assert await bus.list_subjects(s.session("*")) == [s.session("b")]
