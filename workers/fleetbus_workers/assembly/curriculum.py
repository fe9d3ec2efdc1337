"""The tasks of a run: those of the file that it names, or the warehouse's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetbus_workers.environment.adapters.warehouse.tasks import build_held_out_tasks, build_train_tasks
from fleetbus_workers.learner.curriculum import Curriculum, load_curriculum

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration

WAREHOUSE_TASKS = 4096
"""Training tasks of the default environment: more than a run of the default length plays."""


def build_curriculum(configuration: Configuration) -> Curriculum:
    """Training and held-out tasks. Raises `UserError` for a tasks file that cannot be read."""
    run = configuration.run
    if run.tasks:
        return load_curriculum(run.tasks, seed=run.seed)
    held_out = build_held_out_tasks(configuration.evaluation.episodes)
    return Curriculum(build_train_tasks(WAREHOUSE_TASKS, seed=run.seed), held_out, seed=run.seed)
