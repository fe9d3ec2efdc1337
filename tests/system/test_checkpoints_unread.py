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

from fleetbus.audit.run import audit_run
from fleetbus.bus.memory import Files
from fleetbus.config.settings import LearnerSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, LineageStarted, StepTrained
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.checkpoint_choice import CheckpointUnread
from fleetbus_workers.learner.checkpoints import INDEX
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.deployment_member import Member
from tests.support.small_deployment import RUN
from tests.support.virtual_time import virtual_time
from tests.system.test_failure_table_learner import ENTRIES, Training, damage, training

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


@pytest.mark.integration
async def test_a_checkpoint_that_stays_away_ends_the_learner_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, folder):
        shutil.rmtree(folder / "l1-000006")
        left = names(folder)
        second, _ = run.begin()
        await second.ended.wait()
        error = second.failure()
        assert isinstance(error, CheckpointUnread)
        assert "step 6" in str(error)
        assert "--restart-from 4 | 2 | start" in str(error)
        assert "\n" not in str(error)
        assert (names(folder), len(await run.entries(LineageStarted))) == (left, 1)


@pytest.mark.integration
async def test_a_learner_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    async with killed_after(tmp_path, 6) as (run, _):
        for stored in await run.entries(CheckpointStored):
            damage(stored)
        second, _ = run.begin()
        await second.ended.wait()
        assert isinstance(second.failure(), CheckpointUnread)
        assert "damaged" in str(second.failure())
        assert await starts(run) == [("", 0)]


@pytest.mark.parametrize("change", [-3, 40, 100_000])
async def test_a_checkpoint_whose_floor_was_altered_is_not_begun_at(change: int, tmp_path: Path) -> None:
    """It would settle episodes twice, or never, or ask for none."""
    async with killed_after(tmp_path, 6) as (run, folder):
        index = folder / "l1-000006" / INDEX
        altered = msgspec.json.decode(index.read_bytes())
        index.write_bytes(msgspec.json.encode(altered | {"floor": altered["floor"] + change}))
        second, trainer = run.begin()
        await second.ended.wait()
        assert second.error is None
        await run.check_books(trainer)
        assert await starts(run) == [("", 0), ("l1", 4)]


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
        assert "choose from: 4 | 2 | start" in str(second.failure())
        assert [step.step for step in await run.entries(StepTrained)][:4] == [1, 2, 3, 4]


async def lose_power(run: Training, files: Files) -> None:
    """All workers end, and the server comes back with these files; others play on."""
    fleet = run.fleet
    fleet.following.cancel()
    for member in fleet.members.values():
        member.kill()
    for member in fleet.members.values():
        await member.ended.wait()
    fleet.server.kill()
    fleet.server.put_back(files)
    fleet.server.restart()
    fleet.environment("environment-1", slots=8)
    fleet.inference("inference-1", sampler=ScriptedSampler(delay=lambda _: 1.0))


async def purge(run: Training, *kinds: str) -> None:
    """Remove all entries of these kinds from the log."""
    end = (await run.fleet.bus.log_state()).last_sequence + 1
    for kind in kinds:
        await run.fleet.bus.purge(getattr(run.fleet.subjects, kind)("default"), below=end)


async def test_a_log_that_lost_all_of_its_training_but_its_versions_is_gone_on_with_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    async with killed_after(tmp_path, 4) as (run, _):
        await purge(run, "train")
        second, trainer = run.begin()
        await second.ended.wait()
        assert second.error is None
        assert await starts(run) == [("l1", 4)]
        assert [step.step for step in await run.entries(StepTrained)] == list(range(5, STEPS + 1))
        assert trainer.updates == STEPS


async def test_a_log_that_lost_all_of_its_training_is_not_begun_anew_and_what_is_whole_is_offered(tmp_path: Path) -> None:
    """Nothing in it says that it is the log of these checkpoints: a person does."""
    async with killed_after(tmp_path, 4) as (run, folder):
        await purge(run, "train", "policy")
        left = names(folder)
        second, _ = run.begin()
        await second.ended.wait()
        assert "l1-000002, l1-000004" in str(second.failure())
        assert "--restart-from 4 | 2 | start" in str(second.failure())
        assert names(folder) == left
        third, _ = begin(run, "4")
        await third.ended.wait()
        assert third.error is None
        assert await starts(run) == [("l1", 4)]


async def test_a_person_may_name_any_whole_checkpoint_after_a_log_went_back_behind_all_that_it_names(tmp_path: Path) -> None:
    """Those that it names were pruned since: what is whole is ahead of it, and positions that it knows are given again."""
    async with training(tmp_path, steps=STEPS, checkpoint_every=2, keep_checkpoints=2, checkpoint_wait=20.0) as run:
        run.begin()
        await run.until_checkpointed(2)
        server, folder = run.fleet.server, tmp_path / RUN / "checkpoints"
        files = server.copy_files()
        await run.until_checkpointed(8)
        await anyio.sleep(0.1)
        assert names(folder) == ["l1-000006", "l1-000008"]
        await lose_power(run, files)
        second, _ = run.begin()
        await second.ended.wait()
        assert isinstance(second.failure(), CheckpointUnread)
        assert "--restart-from 8 | 6 | start" in str(second.failure())
        third, trainer = begin(run, "6")
        await third.ended.wait()
        assert third.error is None
        assert (await starts(run))[-1] == ("l1", 6)
        entries = decode_entries(
            CheckpointStored, await run.fleet.bus.history([run.fleet.subjects.train("default")]), beside=ENTRIES
        )
        assert [each.floor <= entry.sequence for entry, each in entries if each.step == 6] == [True]
        assert [step.step for step in await run.surviving()] == [1, 2, *range(7, STEPS + 1)]
        assert trainer.updates == STEPS
        report = await audit_run(run.fleet.bus, run.fleet.subjects)
        assert {finding.kind: finding.ids for finding in report.findings} == {"steps_lost": ("l1/3-6",)}


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
