"""A learner's entries in its book: one author at a time, whatever answers are lost or waits are ended on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.streams import plan_run
from fleetbus.errors import LogLost
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, LineageStarted, StepTrained, Subjects, encode
from fleetbus_workers.learner.journal import FencedAppender, JournalMoved, LearnerReplaced
from tests.support.virtual_time import virtual_time

TRAIN = Subjects("r").train("default")

anyio_backend = virtual_time


class SlowAnswers(Faults):
    """Messages are stored at once, and their answers are under way for ``seconds``."""

    seconds = 0.0

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return PublishFault(seconds_after=self.seconds) if self.seconds else NO_PUBLISH_FAULT


def step(number: int, lineage: int = 1) -> StepTrained:
    return StepTrained(lineage=f"l{lineage}", step=number, version=number, episodes=())


def checkpoint(number: int, lineage: int = 1) -> CheckpointStored:
    return CheckpointStored(lineage=f"l{lineage}", step=number, version=number, file="f", floor=1)


async def test_an_author_whose_wait_for_an_answer_was_ended_is_not_taken_for_another() -> None:
    """As when a learner drains in the moment in which it enters an evaluation: it has a checkpoint to enter still."""
    faults = SlowAnswers()
    server = MemoryServer(faults=faults)
    async with server.connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        chain = FencedAppender(bus, TRAIN, 0)
        await chain.append(step(1))
        faults.seconds = 1.0
        with anyio.move_on_after(0.5) as ended:
            await chain.append(step(2))
        assert ended.cancelled_caught
        faults.seconds = 0.0
        assert await chain.append(checkpoint(2)) == 3
        stored = [entry async for entry in bus.scan([TRAIN])]
        assert [message.step for _, message in decode_entries(StepTrained, stored, beside=(CheckpointStored,))] == [1, 2]


async def test_an_author_whose_wait_was_ended_is_told_of_another_that_has_written_since() -> None:
    faults = SlowAnswers()
    server = MemoryServer(faults=faults)
    async with server.connect("r") as bus, server.connect("r", worker="other") as other:
        await bus.declare(plan_run("r", lanes=1))
        chain = FencedAppender(bus, TRAIN, 0)
        faults.seconds = 1.0
        with anyio.move_on_after(0.5):
            await chain.append(step(1))
        faults.seconds = 0.0
        await FencedAppender(other, TRAIN, 1).append(step(2))
        with pytest.raises(LearnerReplaced):
            await chain.append(checkpoint(1))


def start(number: int, worker: str) -> LineageStarted:
    return LineageStarted(lineage=f"l{number}", worker=worker)


@asynccontextmanager
async def begun() -> AsyncIterator[tuple[Bus, FencedAppender]]:
    """A learner's journal with the beginning of its lineage, two steps and a checkpoint."""
    async with MemoryServer().connect("r") as bus:
        await bus.declare(plan_run("r", lanes=1))
        chain = FencedAppender(bus, TRAIN, 0)
        for entry in (start(2, "w"), step(1, 2), step(2, 2), checkpoint(2, 2)):
            await chain.append(entry)
        yield bus, chain


async def test_a_learner_whose_subject_was_purged_was_not_replaced() -> None:
    async with begun() as (bus, chain):
        await bus.purge(TRAIN, below=chain.last + 1)
        with pytest.raises(LogLost, match="has no entry any more, and had one at 4"):
            await chain.append(step(3, 2))


async def test_a_learner_of_which_only_older_entries_are_left_was_not_replaced() -> None:
    async with begun() as (_, chain):
        chain.last += 10
        with pytest.raises(LogLost, match="ends at entry 4, and had one at 14"):
            await chain.append(step(3, 2))


async def test_what_somebody_else_wrote_is_no_newer_learner() -> None:
    async with begun() as (bus, chain):
        await bus.publish(TRAIN, b"garbage")
        with pytest.raises(LogLost, match="is of no newer learner"):
            await chain.append(step(3, 2))


@pytest.mark.parametrize(("entry", "is_replaced"), [
    (start(3, "other"), True), (step(3, 3), True), (start(2, "other"), True), (step(3, 1), False), (start(1, "other"), False),
])  # fmt: skip
async def test_only_a_newer_lineage_replaces_a_learner(entry: Any, is_replaced: bool) -> None:
    async with begun() as (bus, chain):
        await bus.publish(TRAIN, encode(entry))
        with pytest.raises(LearnerReplaced if is_replaced else LogLost):
            await chain.append(step(3, 2))
        if is_replaced and isinstance(entry, LineageStarted):
            with pytest.raises(LearnerReplaced):
                await chain.watch()


async def test_of_two_learners_that_begin_the_same_lineage_the_second_is_replaced() -> None:
    async with begun() as (bus, chain):
        with pytest.raises(LearnerReplaced):
            await FencedAppender(bus, TRAIN, chain.last - 3).append(start(2, "other"))


async def test_a_learner_that_begins_behind_one_that_trains_on_reads_again_where_training_stands() -> None:
    async with begun() as (bus, chain):
        for entry in (start(3, "next"), checkpoint(1, 2)):
            with pytest.raises(JournalMoved):
                await FencedAppender(bus, TRAIN, chain.last - 1, lineage="l3").append(entry)


async def test_a_learner_that_is_told_of_a_checkpoint_by_who_takes_over_is_replaced_and_has_lost_nothing() -> None:
    """The checkpoint is told in the name of its own lineage, before the new one begins."""
    async with begun() as (bus, chain), anyio.create_task_group() as tasks:
        await bus.publish(TRAIN, encode(checkpoint(1, 2)))

        async def begin_later() -> None:
            await anyio.sleep(3)
            await bus.publish(TRAIN, encode(start(3, "next")))

        tasks.start_soon(begin_later)
        with pytest.raises(LearnerReplaced):
            await chain.append(step(3, 2))
