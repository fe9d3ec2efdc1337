"""`fleetbus fork`: a run that begins with a checkpoint of another one, whatever becomes of that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from fleetbus.audit.run import audit_run
from fleetbus.config.load import load_configuration
from fleetbus.config.run_folder import RunFolder, policy_folder_below
from fleetbus.config.seats import configure_learner, list_trained_seats
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects, Task
from fleetbus_workers.cli.train.fork import command
from fleetbus_workers.learner.checkpoints import Checkpoint, write_checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

STEPS = (10, 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run ``old`` with checkpoints of two steps, whose only weight is the number of the step."""
    old = RunFolder(tmp_path / "old")
    trainer = ScriptedTrainer()
    for step in STEPS:
        trainer.updates = step
        write_checkpoint(
            old.checkpoints, Checkpoint(lineage="l1", step=step, version=step, floor=9, settled=(), next_group=0), trainer
        )
    settings = {"run": {"name": "old", "seed": 7}, "learner": {"steps": 30, "restart_from": "10"}}
    old.configuration.write_text(json.dumps(settings))
    return tmp_path


def fork(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--run-folder", str(folder), *arguments], standalone_mode=False)


async def test_a_fork_begins_with_the_weights_of_its_checkpoint_and_counts_its_own_steps(folder: Path) -> None:
    assert fork(folder, "old", "--at", "10", "--run", RUN).exception is None
    tables = json.loads(RunFolder(folder / RUN).configuration.read_text())
    assert (tables["run"], tables["learner"]["restart_from"]) == ({"name": RUN, "seed": 7}, "")
    shutil.rmtree(folder / "old")
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        learner=LearnerSettings(steps=2, groups=1, group_size=2, begin_with=tables["learner"]["begin_with"]),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = ScriptedTrainer()
    with anyio.fail_after(600):
        async with small_deployment(configuration) as fleet:
            await fleet.heard(fleet.environment("environment-0"), fleet.inference("inference-0"))
            learner = fleet.learner(
                "learner-0", trainer=trainer, curriculum=Curriculum([Task(key="t", prompt="play")], [], seed=1)
            )
            await learner.ended.wait()
            report = await audit_run(fleet.bus, Subjects(RUN))
    assert trainer.updates == 10 + 2
    assert report.balanced, report.findings


async def test_a_run_whose_origin_is_damaged_does_not_begin(folder: Path) -> None:
    assert fork(folder, "old", "--run", RUN).exception is None
    origin = Path(json.loads(RunFolder(folder / RUN).configuration.read_text())["learner"]["begin_with"])
    (origin / "trainer.state").unlink()
    (origin / "trainer.state").write_text("other")
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)), learner=LearnerSettings(steps=1, begin_with=str(origin))
    )
    with anyio.fail_after(600):
        async with small_deployment(configuration) as fleet:
            learner = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum([Task(key="t")], [], seed=1))
            await learner.ended.wait()
            error = learner.failure()
    assert isinstance(error, UserError) and "no whole checkpoint" in str(error)


def test_the_newest_checkpoint_is_taken_where_no_step_is_named(folder: Path) -> None:
    assert fork(folder, "old", "--run", "new").exception is None
    assert "updates" in (copied := json.loads((folder / "new/origin/weights.safetensors").read_text()))
    assert copied["updates"] == max(STEPS)


def test_a_fork_takes_the_checkpoints_of_all_policies_that_are_trained(folder: Path) -> None:
    old = RunFolder(folder / "old")
    tables = json.loads(old.configuration.read_text())
    old.configuration.write_text(json.dumps(tables | {"run": tables["run"] | {"seats": "solver=train"}}))
    assert "the policy solver of a trained seat has to begin at step 20" in str(fork(folder, "old", "--run", "new").exception)
    assert sorted(path.name for path in folder.iterdir()) == ["old"]
    for step in STEPS:
        of_solver = Checkpoint(lineage="l1", step=step, version=step, floor=9, settled=(), next_group=0)
        trainer = ScriptedTrainer()
        trainer.updates = 100 + step
        write_checkpoint(policy_folder_below(old, "solver").checkpoints, of_solver, trainer)
    assert fork(folder, "old", "--at", "10", "--run", "new").exception is None
    configuration = load_configuration(file=RunFolder(folder / "new").configuration).configuration
    (seat,) = list_trained_seats(configuration.run)
    begins = [each.learner.begin_with for each in (configuration, configure_learner(configuration, seat))]
    updates = [json.loads((Path(each) / "weights.safetensors").read_text())["updates"] for each in begins]
    assert updates == [10, 110]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["old", "--at", "15", "--run", "new"], "choose from: 10, 20"),
        (["old", "--run", "old"], "exists already"),
        (["other", "--run", "new"], "holds no run"),
        (["old", "--run", "../new"], "must be 1 to 128 letters"),
    ],
)
def test_a_fork_that_cannot_be_made_leaves_nothing(arguments: list[str], says: str, folder: Path) -> None:
    assert says in str(fork(folder, *arguments).exception)
    assert sorted(path.name for path in folder.iterdir()) == ["old"]


def test_a_damaged_checkpoint_is_not_forked_and_leaves_nothing(folder: Path) -> None:
    (folder / "old/checkpoints/l1-000020/trainer.state").write_text("torn")
    assert "no whole checkpoint" in str(fork(folder, "old", "--run", "new").exception)
    assert sorted(path.name for path in folder.iterdir()) == ["old"]


def test_a_checkpoint_on_another_disk_is_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    assert fork(folder, "old", "--run", "new").exception is None
    assert (folder / "new/origin/checkpoint.json").stat().st_nlink == 1
