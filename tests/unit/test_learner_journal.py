"""A learner's entries in its book: one author at a time, whatever answers are lost or waits are ended on the way."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, StepTrained, Subjects
from fleetbus_workers.learner.journal import FencedAppender, LearnerReplaced
from tests.support.virtual_time import virtual_time

TRAIN = Subjects("r").train("default")

anyio_backend = virtual_time


class SlowAnswers(Faults):
    """Messages are stored at once, and their answers are under way for ``seconds``."""

    seconds = 0.0

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return PublishFault(seconds_after=self.seconds) if self.seconds else NO_PUBLISH_FAULT


def step(number: int) -> StepTrained:
    return StepTrained(lineage="l1", step=number, version=number, episodes=())


def checkpoint(number: int) -> CheckpointStored:
    return CheckpointStored(lineage="l1", step=number, version=number, file="f", floor=1)


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
