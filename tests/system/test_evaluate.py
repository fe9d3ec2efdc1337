"""Held-out tasks on demand: every episode has one result, nobody trains on them, and the command says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.config.engines import ENGINES, EngineKind
from fleetbus.config.settings import Configuration, InferenceSettings
from fleetbus.core.training.evaluation_summary import summarise_results
from fleetbus.errors import UserError
from fleetbus_schemas import EpisodeRequested, Heartbeat, Subjects, Task, WorkerRole, encode
from fleetbus_workers.api.evaluation import find_live_roles, start_missing_roles
from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.cli.train.evaluate import _parse_ks
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.held_out import find_newest_version, play
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.replay.fixtures import memory_bus
from tests.support.small_deployment import build_configuration, small_deployment

TASKS = [Task(key=f"held{index}", env="shop", config={"turns": 2}) for index in range(3)]


async def test_every_sample_of_every_task_is_played_with_the_newest_version() -> None:
    told: list[tuple[int, int]] = []
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            fleet.environment("environment")
            fleet.inference("inference")
            published = await find_newest_version(fleet.bus, fleet.subjects, "default")
            results = await play(
                fleet.bus,
                fleet.configuration,
                TASKS,
                name="eval-x",
                samples=2,
                temperature=0.0,
                published=published,
                pinned=True,
                on_progress=lambda done, count: told.append((done, count)),
            )
            requests = await fleet._all(EpisodeRequested, fleet.subjects.tasks("default"))

    summary = summarise_results(results, [1, 2])
    assert (summary.tasks, summary.episodes, summary.graded, summary.versions) == (3, 6, 6, (0,))
    assert told[-1] == (6, 6)
    assert {request.split for request in requests} == {"eval"}
    assert {request.pinned_version for request in requests} == {0}
    assert {request.sampling.temperature for request in requests} == {0.0}


async def test_a_learner_beside_it_trains_on_none_of_it(tmp_path: Path) -> None:
    import msgspec

    from fleetbus.config.settings import EvaluationSettings, LearnerSettings

    configuration = build_configuration()
    configuration = msgspec.structs.replace(
        configuration,
        run=msgspec.structs.replace(configuration.run, folder=str(tmp_path)),
        learner=LearnerSettings(steps=3, groups=2, group_size=2),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = ScriptedTrainer()
    with anyio.fail_after(60):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.environment("environment")
            fleet.inference("inference")
            learner = fleet.learner("learner", trainer=trainer, curriculum=Curriculum([Task(key="t")], [], seed=1))
            await fleet.until(lambda: bool(fleet.results))
            published = await find_newest_version(fleet.bus, fleet.subjects, "default")
            results = await play(
                fleet.bus, configuration, TASKS, name="eval-y", samples=1, temperature=1.0, published=published, pinned=False
            )
            await learner.ended.wait()

    assert len(results) == 3
    assert len(trainer.trained) == 12 and not any(episode.startswith("eval-y") for episode in trainer.trained)


async def test_without_a_version_there_is_nothing_to_evaluate() -> None:
    async with small_deployment(published=False) as fleet:
        with pytest.raises(UserError, match="has no version yet"):
            await find_newest_version(fleet.bus, fleet.subjects, "default")


def test_k_beyond_the_samples_is_refused() -> None:
    assert _parse_ks("", 4) == [1, 4]
    assert _parse_ks("2, 1", 4) == [1, 2]
    for wrong in ("5", "0", "x", "1,,2"):
        with pytest.raises(UserError, match=r"--k"):
            _parse_ks(wrong, 4)


async def test_an_engine_that_is_missing_here_is_told_with_the_flag_that_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "vllm", EngineKind(packages=("no_such_package",), extras=("vllm",)))
    configuration = Configuration(inference=InferenceSettings(engine="vllm"))
    async with small_deployment() as fleet, anyio.create_task_group() as group:
        with pytest.raises(UserError, match="--inference-engine torch"):
            start_missing_roles(group, fleet.bus, configuration, set(), anyio.Event())


async def test_only_those_who_play_and_train_are_listened_for_whoever_else_beats() -> None:
    configuration = Configuration()
    subjects = Subjects(configuration.run.name)
    roles: tuple[WorkerRole, ...] = ("gateway", "recorder", "environment", "inference", "learner")

    async def beat(bus: Bus) -> None:
        while True:
            for role in roles:
                for payload in (encode(Heartbeat(role=role, worker="w")), b"no heartbeat"):
                    await bus.broadcast(subjects.heartbeat(role, "w"), payload)
            await anyio.sleep(0.01)

    with anyio.fail_after(60):
        async with memory_bus(configuration.run.name) as bus, anyio.create_task_group() as group:
            group.start_soon(beat, bus)
            assert await find_live_roles(bus, configuration) == {"environment", "inference", "learner"}
            group.cancel_scope.cancel()


def test_a_run_that_does_not_exist_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_program(["evaluate", "nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_a_model_that_no_run_has_trained_is_evaluated_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleetbus_workers.cli", "evaluate", "--model", str(find_starter_folder()), "--json"]
    ended = subprocess.run(
        [*command, "--episodes", "6", "--samples", "2", "--temperature", "0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["all"]["episodes"], report["all"]["graded"], report["version"]) == (12, 12, 0)
    assert report["all"]["success"] >= 0.5, "the starter policy, decoded greedily, solves most of its tasks"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["default", "--model", "somewhere"], "take the place of a run: leave out default"),
        (["default", "--environment", "own:Class"], "--environment goes with --model"),
        (["--model", "no-such-folder"], "no model folder"),
        (["--recipe", "no-such-recipe"], "no recipe 'no-such-recipe'"),
    ],
)
def test_a_model_and_a_run_are_not_asked_for_at_once(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["evaluate", *arguments]) == 2
    assert words in capsys.readouterr().err
