"""The learner is killed, replaced or cut off: in the lineage that survives nothing is trained twice."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EpisodeSettings, EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus.core.training.lineage import compute_surviving_steps
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import (
    Action,
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    Exclusion,
    LineageStarted,
    StepTrained,
    Task,
    TrainingFinished,
)
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Environment, EnvironmentFailed, Step
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner import pool
from fleetbus_workers.learner.checkpoints import STATE
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.journal import LearnerReplaced
from fleetbus_workers.learner.pool import GroupPool
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.deployment_member import Member
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]
ENTRIES = (LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished)

anyio_backend = virtual_time


class Training:
    """A fleet with a learner that may be killed and begun again."""

    def __init__(self, fleet: SmallDeployment, tasks: list[Task]) -> None:
        self.fleet = fleet
        self._tasks = tasks
        self._learners = 0

    def begin(self) -> tuple[Member, ScriptedTrainer]:
        """One more learner, with nothing in its memory."""
        trainer = ScriptedTrainer()
        curriculum = Curriculum(self._tasks, [], seed=1)
        name = f"learner-{self._learners}"
        self._learners += 1
        return self.fleet.learner(name, trainer=trainer, curriculum=curriculum), trainer

    async def entries(self, kind: type[Any]) -> list[Any]:
        entries = await self.fleet.bus.history([self.fleet.subjects.train("default")])
        return [message for _, message in decode_entries(kind, entries, beside=ENTRIES)]

    async def until_step(self, step: int) -> None:
        """Until this step stands in the log of the newest lineage."""
        async with self.fleet.bus.read([self.fleet.subjects.train("default")]) as reader:
            while True:
                for _, trained in decode_entries(StepTrained, [await reader.receive()], beside=ENTRIES):
                    lineages = await self.entries(LineageStarted)
                    if trained.step == step and trained.lineage == lineages[-1].lineage:
                        return

    async def until_checkpointed(self, step: int, *, lineage: str = "") -> None:
        """Until a checkpoint of this step, of that lineage or of any, stands in the log."""
        async with self.fleet.bus.read([self.fleet.subjects.train("default")]) as reader:
            while True:
                for _, stored in decode_entries(CheckpointStored, [await reader.receive()], beside=ENTRIES):
                    if stored.step == step and lineage in ("", stored.lineage):
                        return

    async def until_checkpoint(self, lineage: str) -> None:
        """Until the second step of a lineage stands in the log with its checkpoint, and older ones are pruned."""
        async with self.fleet.bus.read([self.fleet.subjects.train("default")]) as reader:
            while True:
                for _, stored in decode_entries(CheckpointStored, [await reader.receive()], beside=ENTRIES):
                    if stored.lineage == lineage and stored.step > 1:
                        await anyio.sleep(0.1)
                        return

    async def surviving(self) -> list[StepTrained]:
        """The steps that count, in order."""
        last = compute_surviving_steps(await self.entries(LineageStarted))
        return [step for step in await self.entries(StepTrained) if step.step <= last.get(step.lineage, -1)]

    async def check_books(self, trainer: ScriptedTrainer) -> None:
        """Every step once, every episode at most once, and the trainer was given just what the log says."""
        settings = self.fleet.configuration.learner
        surviving = await self.surviving()
        assert [step.step for step in surviving] == list(range(1, settings.steps + 1))
        trained = [episode for step in surviving for episode in step.episodes]
        (finished,) = await self.entries(TrainingFinished)
        excluded = [each.episode_id for step in [*surviving, finished] for each in step.excluded]
        assert len(trained) == settings.steps * settings.groups * settings.group_size
        assert len(set(trained + excluded)) == len(trained + excluded), "an episode is settled twice"
        assert trainer.trained == trained
        requested = await self._requested()
        floor = max(checkpoint.floor for checkpoint in await self.entries(CheckpointStored))
        skipped = {episode for episode, sequence in requested.items() if sequence < floor} - {*trained, *excluded}
        assert not skipped, "the floor went past a request that nobody settled"

    async def _requested(self) -> dict[str, int]:
        entries = [entry async for entry in self.fleet.bus.scan([self.fleet.subjects.tasks("default")])]
        return {request.episode_id: entry.sequence for entry, request in decode_entries(EpisodeRequested, entries)}


@asynccontextmanager
async def training(
    folder: Path,
    *,
    tasks: list[Task] | None = None,
    slots: int = 8,
    environment: Callable[[], Environment] = ScriptedEnvironment,
    **learner: Any,
) -> AsyncIterator[Training]:
    settings: dict[str, Any] = {"steps": 6, "groups": 2, "group_size": 2, "checkpoint_every": 2, "max_staleness": 1}
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        limits=LimitSettings(),
        episode=EpisodeSettings(max_turns=60),
        learner=LearnerSettings(**(settings | learner)),
        evaluation=EvaluationSettings(episodes=0),
    )
    with anyio.fail_after(3000):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.environment("environment-0", make=environment, slots=slots)
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 1.0))
            yield Training(fleet, tasks or TASKS)


async def test_a_learner_that_nobody_disturbs_balances_its_books(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        learner, trainer = run.begin()
        await learner.ended.wait()
        await run.check_books(trainer)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.5, 4.5, 5.5])
async def test_kill_of_the_learner_and_the_next_resumes_from_its_checkpoint(seconds: float, tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        first, _ = run.begin()
        await anyio.sleep(seconds)
        first.kill()
        second, trainer = run.begin()
        await second.ended.wait()
        assert second.error is None
        await run.check_books(trainer)
        lineages = await run.entries(LineageStarted)
        assert len(lineages) == 2 or seconds == 0.0


@pytest.mark.parametrize("step", [1, 2, 3, 4])
async def test_kill_right_after_a_step_and_that_step_is_void_or_kept_but_never_both(step: int, tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        first, _ = run.begin()
        await run.until_step(step)
        first.kill()
        second, trainer = run.begin()
        await second.ended.wait()
        await run.check_books(trainer)
        second_lineage = (await run.entries(LineageStarted))[1]
        checkpoints = [each.step for each in await run.entries(CheckpointStored) if each.lineage == "l1"]
        assert second_lineage.parent_step == max(checkpoints, default=0)


async def test_a_drained_learner_stores_a_checkpoint_so_that_no_step_is_trained_again(tmp_path: Path) -> None:
    async with training(tmp_path, checkpoint_every=100) as run:
        first, _ = run.begin()
        await run.until_step(3)
        await anyio.sleep(0.5)  # it waits for the next batch by then
        first.drain.set()
        await first.ended.wait()
        trained = [each.step for each in await run.entries(StepTrained)]
        assert [each.step for each in await run.entries(CheckpointStored)] == trained[-1:]
        second, trainer = run.begin()
        await second.ended.wait()
        await run.check_books(trainer)
        assert [each.step for each in await run.entries(StepTrained)] == [1, 2, 3, 4, 5, 6]


def damage(stored: CheckpointStored) -> None:
    folder = Path(stored.file)
    if folder.is_dir():
        (folder / STATE).write_text("damaged")


async def test_checkpoints_that_no_learner_can_begin_at_take_no_place_of_one_that_can(tmp_path: Path) -> None:
    """What was stored last is damaged, and then all of the learner that had begun at the one before."""
    async with training(tmp_path, steps=20, checkpoint_every=1, keep_checkpoints=2) as run:
        first, _ = run.begin()
        await run.until_checkpoint("l1")
        first.kill()
        newest = (await run.entries(CheckpointStored))[-1]
        damage(newest)
        second, _ = run.begin()
        await run.until_checkpoint("l2")
        second.kill()
        for stored in await run.entries(CheckpointStored):
            if stored.lineage == "l2":
                damage(stored)
        third, trainer = run.begin()
        await third.ended.wait()
        await run.check_books(trainer)
        assert [each.parent_step for each in await run.entries(LineageStarted)] == [0, newest.step - 1, newest.step - 1]


async def test_what_was_trained_ahead_of_a_slow_group_stays_trained_however_often_the_learner_is_killed(tmp_path: Path) -> None:
    """The slow group holds the floor down; each checkpoint has to name again what is settled above it."""
    slow = Curriculum(TASKS, [], seed=1).task(0).key
    tasks = [msgspec.structs.replace(task, config={"turns": 30}) if task.key == slow else task for task in TASKS]
    async with training(tmp_path, tasks=tasks, slots=3, groups=1, checkpoint_every=1, max_staleness=8) as run:
        for step in (2, 4, 5):
            learner, _ = run.begin()
            await run.until_step(step)
            await anyio.sleep(0.1)
            learner.kill()
        learner, trainer = run.begin()
        await learner.ended.wait()
        await run.check_books(trainer)


class FailsOften(ScriptedEnvironment):
    """All episodes but those of every fourth task fail."""

    async def open(self, task: Task) -> None:
        await super().open(task)
        self._fails = int(task.key.rpartition("-")[2]) % 4 != 0

    async def step(self, action: Action) -> Step:
        if self._fails:
            raise EnvironmentFailed("gone")
        return await super().step(action)


def cut_within_groups(self: GroupPool) -> list[Exclusion]:
    """As exclusions were told of until groups were kept together."""
    excluded = [exclusion for group in self._excluded for exclusion in group]
    self._excluded = deque([[exclusion] for exclusion in excluded[5:]])
    for exclusion in excluded[:5]:
        self._settle(exclusion.episode_id)
    return excluded[:5]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("kills", [1, 3])
async def test_a_learner_goes_on_after_more_exclusions_than_one_entry_holds(
    kills: int, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that the checkpoint calls settled in part would be asked for again, and settled twice."""
    monkeypatch.setattr(pool, "EXCLUSIONS_PER_ENTRY", 5)
    settings: dict[str, Any] = {"groups": 1, "group_size": 4, "checkpoint_every": 1, "max_staleness": 2}
    async with training(tmp_path, environment=FailsOften, **settings) as run:
        with monkeypatch.context() as patch:
            if is_cut:
                patch.setattr(GroupPool, "take_exclusions", cut_within_groups)
            for step in range(1, kills + 1):
                learner, _ = run.begin()
                await run.until_checkpointed(step)
                learner.kill()
                await learner.ended.wait()
        learner, trainer = run.begin()
        await learner.ended.wait()
        assert learner.error is None
        surviving = await run.surviving()
        trained = [episode for step in surviving for episode in step.episodes]
        excluded = [each for step in surviving for each in step.excluded]
        excluded += [each for entry in await run.entries(TrainingFinished) for each in entry.excluded]
        settled = trained + [each.episode_id for each in excluded]
        assert trainer.trained == trained
        assert len(set(settled)) == len(settled), "an episode is settled twice"
        assert len(excluded) > 5 * len(surviving), "no entry was full"
        assert (await audit_run(run.fleet.bus, run.fleet.subjects)).balanced


async def test_a_learner_that_was_replaced_is_refused_and_stops_for_good(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        first, _ = run.begin()
        await anyio.sleep(3)
        first.cut()
        second, trainer = run.begin()
        await anyio.sleep(3)
        first.mend()
        await first.ended.wait()
        assert isinstance(first.failure(), LearnerReplaced)
        await second.ended.wait()
        assert second.error is None
        await run.check_books(trainer)


@pytest.mark.parametrize("seconds", [5.0, 50.0])
async def test_kill_and_restart_of_the_server_and_training_goes_on(seconds: float, tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        learner, trainer = run.begin()
        await run.until_step(2)
        run.fleet.server.kill()
        await anyio.sleep(seconds)
        run.fleet.server.restart()
        await learner.ended.wait()
        assert learner.error is None
        await run.check_books(trainer)


async def test_a_drained_learner_stops_between_steps_and_the_next_goes_on(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        first, _ = run.begin()
        await run.until_step(2)
        await run.fleet.drain_members([first])
        assert first.error is None
        second, trainer = run.begin()
        await second.ended.wait()
        await run.check_books(trainer)
