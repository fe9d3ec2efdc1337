"""A learner whose checkpoints cannot be read waits for them or for a person's word: a run never begins anew by itself."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from fleetbus.config.settings import LearnerSettings
from fleetbus_schemas import CheckpointStored, LineageStarted, StepTrained
from fleetbus_workers.learner.checkpoint_choice import CheckpointUnread
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import Member
from tests.support.virtual_time import virtual_time
from tests.system.test_failure_table_learner import Training, damage, training

STEPS = 12

anyio_backend = virtual_time


@asynccontextmanager
async def killed_after(folder: Path, step: int, **learner: Any) -> AsyncIterator[tuple[Training, Path]]:
    """A run whose learner was killed at that step, and the folder of its checkpoints."""
    settings: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 2, "checkpoint_wait": 600.0}
    async with training(folder, **(settings | learner)) as run:
        first, _ = run.begin()
        await run.until_checkpointed(step)
        await anyio.sleep(0.1)
        first.kill()
        await first.ended.wait()
        yield run, Path((await run.entries(CheckpointStored))[-1].file).parent


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def begin(run: Training, restart_from: str = "") -> tuple[Member, ScriptedTrainer]:
    """The next learner, with that order on its command line."""
    fleet = run.fleet
    learner: LearnerSettings = msgspec.structs.replace(fleet.configuration.learner, restart_from=restart_from)
    fleet.configuration = msgspec.structs.replace(fleet.configuration, learner=learner)
    return run.begin()


async def starts(run: Training) -> list[tuple[str, int]]:
    return [(started.parent, started.parent_step) for started in await run.entries(LineageStarted)]


async def test_a_folder_that_is_mounted_late_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, folder):
        away = folder.rename(tmp_path / "away")
        second, trainer = run.begin()
        await anyio.sleep(200)
        assert await starts(run) == [("", 0)]
        folder.mkdir()  # the mount point
        await anyio.sleep(200)
        folder.rmdir()
        away.rename(folder)
        await second.ended.wait()
        assert second.error is None
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", 6)]


async def test_a_checkpoint_that_stays_away_ends_the_learner_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, folder):
        shutil.rmtree(folder / "l1-000006")
        left = names(folder)
        second, _ = run.begin()
        await second.ended.wait()
        error = second.failure()
        assert isinstance(error, CheckpointUnread)
        assert "step 6" in str(error)
        assert "--restart-from 2 | 4 | start" in str(error)
        assert "\n" not in str(error)
        assert (names(folder), len(await run.entries(LineageStarted))) == (left, 1)


async def test_a_learner_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, _):
        for stored in await run.entries(CheckpointStored):
            damage(stored)
        second, _ = run.begin()
        await second.ended.wait()
        assert isinstance(second.failure(), CheckpointUnread)
        assert "damaged" in str(second.failure())
        assert await starts(run) == [("", 0)]


async def test_a_learner_that_waits_for_a_checkpoint_can_be_drained(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, folder):
        folder.rename(tmp_path / "away")
        second, _ = run.begin()
        await anyio.sleep(50)
        second.drain.set()
        with anyio.fail_after(1):
            await second.ended.wait()
        assert second.error is None


@pytest.mark.parametrize(("order", "step"), [("start", 0), ("2", 2), ("4", 4)])
async def test_a_person_says_where_to_go_on_and_is_obeyed_once(order: str, step: int, tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, folder):
        shutil.rmtree(folder / "l1-000006")
        second, _ = begin(run, order)
        await run.until_step(9)
        second.kill()
        third, trainer = run.begin()  # by whoever started the second one, with the same command
        await third.ended.wait()
        assert third.error is None
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", step), ("l2", 8)]


async def test_what_a_person_started_anew_can_be_gone_back_upon(tmp_path: Path) -> None:
    """The checkpoints of the lineage before stay until the new one has come as far."""
    async with killed_after(tmp_path, 6) as (run, folder):
        second, _ = begin(run, "start")
        await run.until_checkpointed(2, lineage="l2")
        second.kill()
        assert "l1-000006" in names(folder)
        third, trainer = begin(run, "6")
        await third.ended.wait()
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", 0), ("l1", 6)]
        assert [step.lineage for step in await run.surviving()] == ["l1"] * 6 + ["l3"] * 6


async def test_a_finished_run_needs_no_checkpoint(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        first, _ = run.begin()
        await first.ended.wait()
        shutil.rmtree(tmp_path)
        second, _ = run.begin()
        await second.ended.wait()
        assert second.error is None
        assert len(await run.entries(LineageStarted)) == 1


async def test_a_run_whose_folder_was_moved_goes_on(tmp_path: Path) -> None:
    async with killed_after(tmp_path / "before", 6) as (run, _):
        (tmp_path / "before").rename(tmp_path / "after")
        settings = msgspec.structs.replace(run.fleet.configuration.run, folder=str(tmp_path / "after"))
        run.fleet.configuration = msgspec.structs.replace(run.fleet.configuration, run=settings)
        second, trainer = run.begin()
        await second.ended.wait()
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", 6)]


async def test_a_step_that_has_no_checkpoint_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 4) as (run, _):
        second, _ = begin(run, "3")
        await second.ended.wait()
        assert "2 | 4" in str(second.failure())
        assert [step.step for step in await run.entries(StepTrained)][:4] == [1, 2, 3, 4]


async def test_a_log_that_went_back_to_before_its_first_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    """All that it still has of the training is the beginning of the first lineage; the folder has more."""
    async with killed_after(tmp_path, 4) as (run, folder):
        await run.fleet.bus.purge(
            run.fleet.subjects.train("default"), below=(await run.fleet.bus.log_state()).last_sequence + 1
        )
        left = names(folder)
        second, _ = run.begin()
        await second.ended.wait()
        assert "l1-000002, l1-000004" in str(second.failure())
        assert "--restart-from start" in str(second.failure())
        assert names(folder) == left
        third, _ = begin(run, "start")
        await run.until_checkpointed(2, lineage="l2")
        third.kill()


async def test_a_log_that_lost_its_newest_checkpoint_is_gone_on_with_from_the_one_before_and_says_so(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 4) as (run, folder):
        shutil.copytree(folder / "l1-000004", folder / "l1-000008")
        with structlog.testing.capture_logs() as lines:
            second, trainer = run.begin()
            await second.ended.wait()
        assert second.error is None
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", 4)]
        (said,) = [line for line in lines if "log has lost entries" in line["event"]]
        assert said["checkpoints"] == ["l1-000008"]
