"""Models and trainers that cannot see refuse what shows images, by name, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, LearnerSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.assembly.vision import check_vision, load_local_tasks
from fleetbus_workers.up.checks import check_everything, check_images

CLICKS = [Task(key=f"click-{number}", modality="browser_use") for number in range(5)]
FRAMES = Task(key="lake", config={"frames": True})
PLAIN = Task(key="add", prompt="Add.")


def configured(
    *,
    model: Path | str = "",
    engine: Any = "torch",
    trainer: Any = "torch",
    images: bool = True,
    environment: str = "warehouse",
) -> Configuration:
    return Configuration(
        run=RunSettings(model=str(model), environment=environment),
        inference=InferenceSettings(engine=engine),
        learner=LearnerSettings(trainer=trainer),
        environment=EnvironmentSettings(images=images),
    )


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    folder = tmp_path / "seeing"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    return folder


@pytest.mark.parametrize("role", ["up", "inference", "learner"])
def test_a_run_without_images_is_nobodys_concern(role: Any) -> None:
    check_vision(configured(images=False), [PLAIN], role=role)


@pytest.mark.parametrize("role", ["up", "inference", "learner"])
def test_a_model_that_sees_is_shown_images(role: Any, seeing: Path) -> None:
    check_vision(configured(model=seeing), [PLAIN, *CLICKS], role=role)
    check_vision(configured(model=seeing, environment="colours"), role=role)


@pytest.mark.parametrize("engine", ["openai", "tinker"])
@pytest.mark.parametrize("role", ["up", "inference"])
def test_an_engine_without_vision_is_named_with_the_tasks(engine: str, role: Any, seeing: Path) -> None:
    with pytest.raises(UserError, match=rf"engine {engine} reads text only.*click-0 \(browser_use\), .* and 2 more"):
        check_vision(configured(model=seeing, engine=engine), [PLAIN, *CLICKS], role=role)


@pytest.mark.parametrize("role", ["up", "learner"])
def test_a_trainer_without_vision_is_named(role: Any, seeing: Path) -> None:
    with pytest.raises(UserError, match=r"trainer tinker reads text only.*lake \(frames\)"):
        check_vision(configured(model=seeing, trainer="tinker"), [FRAMES], role=role)


def test_a_learner_alone_is_not_asked_for_the_engine_of_others(seeing: Path) -> None:
    check_vision(configured(model=seeing, engine="openai"), CLICKS, role="learner")


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("role", ["up", "inference", "learner"])
def test_a_text_model_is_refused_under_an_engine_that_sees(engine: str, role: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=rf"model {tmp_path} reads text only, and these tasks show images: click-0"):
        check_vision(configured(model=tmp_path, engine=engine), CLICKS, role=role)


@pytest.mark.parametrize("spec", ["colours", "words=textarena\nseen=colours:3"])
def test_an_environment_that_shows_images_is_named(spec: str) -> None:
    with pytest.raises(
        UserError, match="model that a run starts with reads text only, and the environment colours shows images"
    ):
        check_vision(configured(environment=spec, images=False))


def test_images_that_are_turned_on_for_a_text_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"reads text only, and environment\.images is on.*turn it off"):
        check_vision(configured())


def test_images_that_nobody_turned_on_are_told(seeing: Path) -> None:
    with pytest.raises(UserError, match=r"these tasks show images: .*, but environment\.images is off: turn it on"):
        check_vision(configured(model=seeing, images=False), CLICKS)


def test_a_missing_package_is_told_with_its_extra(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pillow is not installed, .*: pip install 'fleetbus\[vision\]'"):
        check_vision(configured(model=seeing))


def test_up_asks_before_it_starts_anything(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text('[{"key": "click", "prompt": "Click.", "env_key": "web", "task_modality": "computer_use"}]')
    configuration = Configuration(run=RunSettings(tasks=str(tasks), folder=str(tmp_path)))
    for check in (check_images, check_everything):
        with pytest.raises(UserError, match=r"reads text only, and these tasks show images: click \(computer_use\)"):
            check(configuration)
    assert [task.key for task in load_local_tasks(configuration)] == ["click"]
