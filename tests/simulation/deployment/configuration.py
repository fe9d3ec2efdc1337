"""The configuration of a simulated fleet: limits short enough that everything that can hang is cut off within a run."""

from __future__ import annotations

import random
from pathlib import Path

from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.config.seats import configure_learner, configure_seat, list_policies, parse_seats
from fleetbus.config.settings import (
    AlgorithmSettings,
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
    WeightsSettings,
)
from fleetbus_schemas import Task
from tests.simulation.platform.process import RUN
from tests.simulation.scenario.shape import OTHER_POLICY, OTHER_SEAT, Scenario

ARCHIVE = "archive"
MAX_MODEL_LEN = 1024
COMPACTED_TOKENS = 60
"""Fewer than most episodes have: a turn is 8 sampled tokens and a dozen that are shown."""

CHECKPOINT_WAIT_SECONDS = 60.0
"""What a learner waits for a checkpoint before it leaves the decision to an operator."""


def build_configuration(scenario: Scenario, folder: Path) -> Configuration:
    """What every worker of the scenario is given."""
    played_by = "train" if scenario.trained_seat else OTHER_POLICY
    seats = f"{OTHER_SEAT}={played_by}" if scenario.other_seat else ""
    return Configuration(
        run=RunSettings(name=RUN, folder=str(folder), seed=scenario.seed, seats=seats),
        nats=NatsSettings(lanes=scenario.lanes, max_bytes=scenario.log_bytes),
        episode=EpisodeSettings(max_turns=scenario.max_turns, seat_limits=scenario.seat_limits),
        limits=LimitSettings(
            open=20,
            reset=20,
            step=scenario.pace.step_seconds,
            action=120 * scenario.pace.timers,
            verify=15,
            close=10,
            late=scenario.pace.late_seconds,
            idle=scenario.idle_seconds,
            episode=scenario.episode_seconds,
            grace=40,
            drain=scenario.drain_seconds,
        ),
        environment=EnvironmentSettings(
            slots=scenario.environment_slots,
            session_slots=scenario.session_slots if scenario.session_clients + scenario.gateway_clients else 0,
            max_attempts=scenario.max_attempts,
            compaction=scenario.compaction,
            compaction_share=COMPACTED_TOKENS / MAX_MODEL_LEN,
            compaction_turns=1,
        ),
        inference=InferenceSettings(slots=scenario.inference_slots, max_model_len=MAX_MODEL_LEN),
        learner=LearnerSettings(
            steps=scenario.steps,
            groups=scenario.groups,
            group_size=scenario.group_size,
            checkpoint_every=scenario.checkpoint_every,
            max_staleness=scenario.max_staleness,
            stale_groups=scenario.stale_groups,
            advantage_estimator=scenario.advantage_estimator,
            min_group_size=scenario.min_group_size,
            checkpoint_wait=CHECKPOINT_WAIT_SECONDS,
            archive=str(folder / ARCHIVE) if scenario.recorder else "",
        ),
        algorithm=AlgorithmSettings(
            dynamic_sampling=scenario.dynamic_sampling,
            mask_truncated_completions=scenario.mask_truncated,
            credit_assignment="turn" if scenario.credit_per_turn else "episode",
        ),
        weights=WeightsSettings(store="nats" if scenario.weights_in_bucket else "folder"),
        evaluation=EvaluationSettings(
            episodes=scenario.evaluation_episodes, every=scenario.evaluation_every, greedy=scenario.eval_greedy
        ),
    )


def plan_streams(scenario: Scenario, configuration: Configuration) -> RunPlan:
    """The run as it is declared."""
    return plan_run(
        RUN,
        policies=list_policies(configuration.run),
        lanes=scenario.lanes,
        max_bytes=scenario.log_bytes,
        duplicate_window_seconds=scenario.duplicate_window_seconds,
    )


def serve_other(configuration: Configuration) -> Configuration:
    """The same for an inference worker of the other policy."""
    (seat,) = parse_seats(configuration.run.seats)
    return configure_seat(configuration, seat)


def configure_learners(scenario: Scenario, configuration: Configuration) -> dict[str, Configuration]:
    """By policy what its learner is given."""
    trained = [seat for seat in parse_seats(configuration.run.seats) if seat.trained]
    found = {configuration.run.policy: configuration} | {
        seat.policy: configure_learner(configuration, seat) for seat in trained
    }
    assert tuple(found) == scenario.trained_policies
    return found


def build_tasks(scenario: Scenario) -> list[Task]:
    """Tasks of different lengths; some are longer than the policy's turns."""
    draw = random.Random(f"tasks/{scenario.seed}")
    return [Task(key=f"task-{index}", config={"turns": draw.choice(scenario.turns)}) for index in range(scenario.tasks)]
