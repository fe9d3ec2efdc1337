"""The configuration of a simulated fleet: limits short enough that everything that can hang is cut off within a run."""

from __future__ import annotations

import random
from pathlib import Path

from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus_schemas import Task
from fleetbus_workers.simulation.process import RUN
from fleetbus_workers.simulation.scenario import Scenario

ARCHIVE = "archive"
LANES = 12
LOG_BYTES = 1 << 30

TURNS = (2, 3, 4, 4, 5, 6, 7)
MAX_TURNS = 6

CHECKPOINT_WAIT_SECONDS = 60.0
"""What a learner waits for a checkpoint before it leaves the decision to an operator."""


def build_configuration(scenario: Scenario, folder: Path) -> Configuration:
    """What every worker of the scenario is given."""
    return Configuration(
        run=RunSettings(name=RUN, folder=str(folder), seed=scenario.seed),
        nats=NatsSettings(lanes=LANES, max_bytes=LOG_BYTES),
        episode=EpisodeSettings(max_turns=MAX_TURNS),
        limits=LimitSettings(
            open=20,
            reset=20,
            step=20,
            action=120,
            verify=15,
            close=10,
            idle=scenario.idle_seconds,
            episode=600,
            grace=40,
            drain=scenario.drain_seconds,
        ),
        environment=EnvironmentSettings(slots=scenario.environment_slots),
        inference=InferenceSettings(slots=scenario.inference_slots),
        learner=LearnerSettings(
            steps=scenario.steps,
            groups=scenario.groups,
            group_size=scenario.group_size,
            checkpoint_every=scenario.checkpoint_every,
            max_staleness=scenario.max_staleness,
            checkpoint_wait=CHECKPOINT_WAIT_SECONDS,
            archive=str(folder / ARCHIVE) if scenario.recorder else "",
        ),
        evaluation=EvaluationSettings(episodes=scenario.evaluation_episodes),
    )


def build_tasks(scenario: Scenario) -> list[Task]:
    """Tasks of different lengths; some are longer than the policy's turns."""
    draw = random.Random(f"tasks/{scenario.seed}")
    return [Task(key=f"task-{index}", config={"turns": draw.choice(TURNS)}) for index in range(24)]
