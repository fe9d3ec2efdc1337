"""A worker that joins a run after months begins where it is needed, without all that was published before in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.errors import UserError
from fleetbus_schemas import (
    CheckpointStored,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    Subjects,
    TrainingFinished,
    encode,
)
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.checkpoint_choice import CheckpointUnread
from fleetbus_workers.learner.checkpoints import INDEX, Checkpoint, write_checkpoint
from fleetbus_workers.learner.held_out import find_newest_version
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.resume import ResumePoint, find_resume_point, read_book, read_published_versions
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import run_inline, small_deployment
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("r")

anyio_backend = virtual_time


@pytest.fixture(autouse=True)
def no_whole_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes have histories; subjects that grow with the run must not be read into memory at once."""
    history = MemoryBus.history

    async def of_episodes(bus: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
        assert not [subject for subject in subjects if subject.split(".")[2] in ("train", "policy")], subjects
        return await history(bus, subjects)

    monkeypatch.setattr(MemoryBus, "history", of_episodes)


def version(number: int, step: int) -> PolicyPublished:
    return PolicyPublished(policy="default", version=number, lineage="l1", step=step, uri="", manifest=(), size_bytes=0)


class Counting(ScriptedSampler):
    """Counts the versions that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    async def load(self, policy: PolicyPublished) -> None:
        await super().load(policy)
        self.loaded.append(policy.version)


@pytest.mark.parametrize("a_learner_begins", [False, True])
async def test_an_inference_worker_begins_with_the_newest_version(a_learner_begins: bool) -> None:
    sampler = Counting()
    with anyio.fail_after(300):
        async with small_deployment(published=False) as fleet:
            for number in range(50):
                await fleet.publish_policy(number)
            if a_learner_begins:
                await fleet.stored(fleet.subjects.policy("default"), LineageStarted(lineage="l2", worker="w"))
            fleet.inference("inference", sampler=sampler)
            await fleet.until(lambda: "inference" in fleet.beats and fleet.beats["inference"].policy_version == 49)
            await fleet.publish_policy(50)
            await fleet.until(lambda: fleet.beats["inference"].policy_version == 50)
    assert sampler.loaded == [49, 50]


async def test_a_learner_begins_where_the_surviving_lineage_stands(tmp_path: Path) -> None:
    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))

        async def book(*entries: Message | bytes) -> int:
            sequence = 0
            for entry in entries:
                payload = entry if isinstance(entry, bytes) else encode(entry)
                sequence = (await bus.publish(SUBJECTS.train("default"), payload)).sequence
            return sequence

        def step(lineage: str, number: int) -> StepTrained:
            return StepTrained(lineage=lineage, step=number, version=number, episodes=())

        whole = Checkpoint(lineage="l1", step=2, version=2, floor=1, settled=(), next_group=0)
        file = write_checkpoint(tmp_path, whole, ScriptedTrainer()).path
        checkpoint = CheckpointStored(lineage="l1", step=2, version=2, file=str(file), floor=1)
        started = LineageStarted(lineage="l1", worker="w")
        await book(started, step("l1", 1), step("l1", 2), checkpoint, b"not a message", step("l1", 3))
        last = await book(LineageStarted(lineage="l2", worker="w", parent="l1", parent_step=2), b"not a message")
        told = await read_book(bus, SUBJECTS, "default")
        beginning = await find_resume_point(told, runtime=Runtime(offload=run_inline))
        assert (beginning.lineage, beginning.parent, beginning.train_last) == ("l3", "l2", last)
        assert (beginning.step, told.finished_step) == (2, -1)
        await book(TrainingFinished(lineage="l2", step=4, version=4, more=True))
        assert (await read_book(bus, SUBJECTS, "default")).finished_step == -1  # its author ended before it said all
        await book(TrainingFinished(lineage="l2", step=4, version=4))
        assert (await read_book(bus, SUBJECTS, "default")).finished_step == 4


async def test_names_and_numbers_of_lineages_that_the_log_has_lost_do_not_come_again(tmp_path: Path) -> None:
    """The log went back in time: what lies beside it still knows. A checkpoint of that name would be written over."""
    checkpoints, weights, runtime = tmp_path / "checkpoints", tmp_path / "weights", Runtime(offload=run_inline)
    lost = Checkpoint(lineage="l3", step=7, version=9, floor=1, settled=(), next_group=0)
    write_checkpoint(checkpoints, lost, ScriptedTrainer())
    weights.mkdir()
    (weights / "l3-v000009.safetensors").write_bytes(b"weights")
    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))
        await bus.publish(SUBJECTS.train("default"), encode(LineageStarted(lineage="l1", worker="w")))
        await bus.publish(SUBJECTS.policy("default"), encode(version(4, 4)))
        told = await read_book(bus, SUBJECTS, "default")
        beginning = await find_resume_point(told, folder=checkpoints, restart="start", runtime=runtime)
        assert (beginning.lineage, beginning.parent) == ("l4", "l1")
        publication = Publication(
            bus, SUBJECTS, ScriptedTrainer(), policy="default", lineage="l4", folder=weights, keep=2, runtime=runtime
        )
        await publication.fence(LineageStarted(lineage="l4", worker="w"))
        assert await publication.publish(4) == 10


@pytest.mark.parametrize(("reached", "step"), [(2, 2), (3, 2), (1, 0)])
async def test_the_only_checkpoint_is_gone_on_from_although_the_log_does_not_name_it(
    tmp_path: Path, reached: int, step: int
) -> None:
    """Its learner was killed before it told of it, or the log lost that entry. One that is ahead of the log is not."""
    write_checkpoint(
        tmp_path, Checkpoint(lineage="l1", step=2, version=2, floor=1, settled=(), next_group=0), ScriptedTrainer()
    )
    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))
        steps = [StepTrained(lineage="l1", step=number + 1, version=number + 1, episodes=()) for number in range(reached)]
        for entry in (LineageStarted(lineage="l1", worker="w"), *steps):
            await bus.publish(SUBJECTS.train("default"), encode(entry))
        told, runtime = await read_book(bus, SUBJECTS, "default"), Runtime(offload=run_inline)
        if not step:
            with pytest.raises(UserError, match=r"the log names no checkpoint, but .* contains l1-000002"):
                await find_resume_point(told, folder=tmp_path, runtime=runtime)
            return
        beginning = await find_resume_point(told, folder=tmp_path, runtime=runtime)
    assert (beginning.step, beginning.parent, beginning.unrecorded) == (step, "l1", True)


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = Checkpoint(lineage="l1", step=step, version=step, floor=1, settled=(), next_group=0)
        write_checkpoint(folder, checkpoint, ScriptedTrainer())


async def resume(folder: Path, *, restart: str = "") -> ResumePoint:
    """Of a run whose log names no checkpoint and reached step 4."""
    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))
        for entry in (LineageStarted(lineage="l1", worker="w"), StepTrained(lineage="l1", step=4, version=4, episodes=())):
            await bus.publish(SUBJECTS.train("default"), encode(entry))
        told = await read_book(bus, SUBJECTS, "default")
        return await find_resume_point(told, folder=folder, restart=restart, runtime=Runtime(offload=run_inline))


@pytest.mark.parametrize("damage", ["other bytes", "another step"])
async def test_a_damaged_checkpoint_that_the_log_does_not_name_is_passed_over_for_an_older_one(
    tmp_path: Path, damage: str
) -> None:
    write_steps(tmp_path, 2, 3 if damage == "another step" else 4)
    if damage == "another step":
        (tmp_path / "l1-000003").rename(tmp_path / "l1-000004")
    else:
        next(file for file in (tmp_path / "l1-000004").iterdir() if file.name != INDEX).write_bytes(b"other")
    beginning = await resume(tmp_path)
    assert (beginning.step, beginning.unrecorded) == (2, True)


async def test_a_checkpoint_that_cannot_be_read_is_waited_for_although_the_log_does_not_name_it(tmp_path: Path) -> None:
    """Its disk may be away. A person may order to go on without it."""
    write_steps(tmp_path, 2)
    (tmp_path / "l1-000004").mkdir()
    with pytest.raises(CheckpointUnread, match=r"step 4: .*l1-000004 cannot be read .*--restart-from 2 | start"):
        await resume(tmp_path)
    ordered = await resume(tmp_path, restart="2")
    assert (ordered.step, ordered.unrecorded) == (2, True)
    over = await resume(tmp_path, restart="start")
    assert (over.step, over.unrecorded) == (0, False)


async def test_a_checkpoint_is_read_outside_of_the_event_loop(tmp_path: Path) -> None:
    """Its check sums are those of all weights: many gigabytes, while the connection has to be kept."""
    checkpoint = Checkpoint(lineage="l1", step=2, version=2, floor=1, settled=(), next_group=0)
    path = write_checkpoint(tmp_path, checkpoint, ScriptedTrainer()).path
    offloaded: list[Any] = []

    async def offload(function: Any, *arguments: Any) -> Any:
        offloaded.append(arguments)
        return function(*arguments)

    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))
        for entry in (
            LineageStarted(lineage="l1", worker="w"),
            CheckpointStored(lineage="l1", step=2, version=2, file=str(path), floor=1),
        ):
            await bus.publish(SUBJECTS.train("default"), encode(entry))
        beginning = await find_resume_point(await read_book(bus, SUBJECTS, "default"), runtime=Runtime(offload=offload))
    assert (beginning.step, beginning.checkpoint_path) == (2, path)
    assert offloaded == [(path, "")]


async def test_the_lineages_and_steps_of_all_versions_are_known() -> None:
    async with MemoryServer().connect("r", worker="learner") as bus:
        await bus.declare(plan_run("r", lanes=1))
        assert await read_published_versions(bus, SUBJECTS, "default") == {}
        for number, step in ((0, 0), (1, 1), (2, 0)):
            await bus.publish(SUBJECTS.policy("default"), encode(version(number, step)))
        assert await read_published_versions(bus, SUBJECTS, "default") == {0: ("l1", 0, 0), 1: ("l1", 1, 0), 2: ("l1", 0, 0)}


@pytest.mark.parametrize("a_learner_begins", [False, True])
async def test_an_evaluation_plays_the_newest_version(a_learner_begins: bool) -> None:
    async with MemoryServer().connect("r", worker="operator") as bus:
        await bus.declare(plan_run("r", lanes=1))
        with pytest.raises(UserError, match="no version yet"):
            await find_newest_version(bus, SUBJECTS, "default")
        for number in range(3):
            await bus.publish(SUBJECTS.policy("default"), encode(version(number, number)))
        if a_learner_begins:
            await bus.publish(SUBJECTS.policy("default"), encode(LineageStarted(lineage="l2", worker="w")))
        assert (await find_newest_version(bus, SUBJECTS, "default")).version == 2
