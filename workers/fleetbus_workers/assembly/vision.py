"""Rejects tasks with images before anything starts, where the engine, trainer or model reads text only.

Who sees: an engine and a trainer that are handed pixels, with a model folder that has a vision tower, in a run that shows
images at all (``environment.images``). Asked by `up`, by an inference worker and by a learner, each for itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fleetbus.config.engines import list_engines
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.tasks.files import load_dataset
from fleetbus_schemas import Task
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.environment.keyed_specs import parse_keyed_specs
from fleetbus_workers.images.model_folder import has_vision

ENGINES_WITH_VISION = frozenset(list_engines(lambda kind: kind.takes_images))
TRAINERS_WITH_VISION = frozenset({"torch"})

IMAGE_MODALITIES = frozenset({"computer_use", "browser_use"})
"""Task modalities whose observations are screenshots."""

IMAGE_ENVIRONMENTS = frozenset({"colours"})
"""Environments that are nothing without images."""

MAX_LISTED = 3
SKIP_HINT = "leave them out: fleetbus tasks split --modality tool_use"


def check_vision(
    configuration: Configuration, tasks: Iterable[Task] = (), *, role: Literal["up", "inference", "learner"] = "up"
) -> None:
    """Raise `UserError` naming what shows images and who of ``role`` cannot see them."""
    shown = [f"{task.key} ({_describe_images(task)})" for task in tasks if _describe_images(task)]
    what, instead = _find_image_source(shown, configuration)
    if not what:
        return
    engine, trainer = configuration.inference.engine, configuration.learner.trainer
    if role != "learner" and engine not in ENGINES_WITH_VISION:
        raise UserError(
            f"the engine {engine} reads text only, and {what}; choose {_join_names(ENGINES_WITH_VISION)}, or {instead}"
        )
    if role != "inference" and trainer not in TRAINERS_WITH_VISION:
        raise UserError(
            f"the trainer {trainer} reads text only, and {what}; choose {_join_names(TRAINERS_WITH_VISION)}, or {instead}"
        )
    _check_model(configuration, what, instead)
    if not configuration.environment.images:
        raise UserError(f"{what}, but environment.images is off: turn it on for all roles, or {instead}")
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"pillow is not installed, and {what}: pip install 'fleetbus[vision]', or {instead}")


def load_local_tasks(configuration: Configuration) -> list[Task]:
    """The run's tasks if they lie on this machine: a worker that never reads them does not fetch them for a check."""
    tasks = configuration.run.tasks
    return load_dataset(tasks) if tasks and Path(tasks).exists() else []


def _check_model(configuration: Configuration, what: str, instead: str) -> None:
    folder = find_model_folder(configuration.run)
    if not has_vision(folder):
        name = configuration.run.model or "that a run starts with"
        raise UserError(f"the model {name} reads text only, and {what}; name a vision model with --model, or {instead}")


def _find_image_source(shown: list[str], configuration: Configuration) -> tuple[str, str]:
    """The setting that shows images, and how to do without; empty if none does."""
    if shown:
        names = ", ".join(shown[:MAX_LISTED]) + (f" and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else "")
        return f"these tasks show images: {names}", SKIP_HINT
    for spec in parse_keyed_specs(configuration.run.environment).values():
        if (kind := spec.partition(":")[0]) in IMAGE_ENVIRONMENTS:
            return f"the environment {kind} shows images", "another environment"
    if configuration.environment.images:
        return "environment.images is on", "turn it off"
    return "", ""


def _describe_images(task: Task) -> str:
    """The way in which a task shows images; empty if it shows none, as far as it says."""
    if task.modality in IMAGE_MODALITIES:
        return str(task.modality)
    return "frames" if task.config.get("frames") is True else ""


def _join_names(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))
