"""Counting of episodes that tasks lose, and that with the defaults a slow task is trained as often as it was asked for."""

from __future__ import annotations

import random
from collections import Counter

import anyio
import pytest

from fleetbus.config.settings import LearnerSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus.core.training.task_losses import TaskLosses
from fleetbus.delivery.requests import StoredRequest
from fleetbus_schemas import ActionReference, EpisodeFinished, EpisodeRequested, Outcome, Task
from fleetbus_schemas.training import Exclusion
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.pool import GroupPool
from tests.support.virtual_time import virtual_time
from tests.unit.test_admission import RecordedRequests

anyio_backend = virtual_time

STEP_SECONDS = 10.0
SECONDS = {"fast": (1.0, 9.0), "slow": (15.0, 45.0)}
"""A slow task takes longer than two steps, now and then five."""

SUCCESS = {"fast": 0.3, "slow": 0.8}


def finished(number: int, task: str, outcome: Outcome = "completed", seconds: float = 1.0) -> EpisodeFinished:
    reward = 1.0 if outcome == "completed" else None
    return EpisodeFinished(
        episode_id=f"e{number}", group_id="g", attempt=1, outcome=outcome, worker="w", task_key=task, reward=reward,
        timings={"step": seconds, "verify": 0.0},
    )  # fmt: skip


def test_a_task_that_loses_a_quarter_of_its_episodes_is_named_with_reasons_and_seconds() -> None:
    losses = TaskLosses()
    for number in range(20):
        losses.record_result(finished(number, "slow" if number % 2 else "fast", seconds=30.0 if number % 2 else 1.0))
    lost = [Exclusion(episode_id=f"e{number}", reason="stale" if number > 3 else "timeout") for number in (1, 3, 5)]
    losses.record_step([f"e{number}" for number in range(20) if number not in (1, 3, 5)], lost)
    assert losses.metrics == {"lost_share": 3 / 20, "lost_share_worst": 0.3, "tasks_losing": 1.0}
    assert losses.describe() == (
        "1 tasks lose many episodes (all take 15.5 s on average): slow 3 of 10 (stale 1, timeout 2; 30.0 s each)"
    )


def test_few_episodes_evaluations_and_a_second_result_name_no_task() -> None:
    losses = TaskLosses()
    for number in range(4):
        losses.record_result(finished(number, "rare"))
        losses.record_result(finished(number, "rare"))
    losses.record_step([], [Exclusion(episode_id=f"e{number}", reason="stale") for number in range(4)])
    losses.record_step(["unknown"], [])
    assert losses.describe() == "" and losses.metrics == {"lost_share": 1.0, "lost_share_worst": 0.0, "tasks_losing": 0.0}


class Fleet(RecordedRequests):
    """Plays every request for as long as its task takes, with as much success as that has."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__()
        self._tasks = tasks
        self.pool: GroupPool
        self._draw = random.Random(7)

    async def publish(self, request: EpisodeRequested) -> StoredRequest:
        stored = await super().publish(request)
        self._tasks.start_soon(self._play, request, stored.sequence)
        return stored

    async def _play(self, request: EpisodeRequested, position: int) -> None:
        kind = request.task.key.partition("-")[0]
        seconds = self._draw.uniform(*SECONDS[kind])
        await anyio.sleep(seconds)
        result = EpisodeFinished(
            episode_id=request.episode_id, group_id=request.group_id, attempt=1, outcome="completed", worker="w",
            task_key=request.task.key, reward=float(self._draw.random() < SUCCESS[kind]), request_sequence=position,
            actions=(ActionReference(sequence=1, lane="e0", turn=0),), policy_versions=(request.policy_version,),
            timings={"step": seconds},
        )  # fmt: skip
        self.pool.add_result(result, 1_000_000 + position)


async def train(settings: LearnerSettings) -> tuple[Counter[str], Counter[str], GroupPool]:
    """Groups by kind of task, as they were asked for and as they were trained, of half slow and half fast tasks."""
    progress, trained = [0, 0], Counter[str]()
    async with anyio.create_task_group() as tasks:
        fleet = Fleet(tasks)
        pool = fleet.pool = GroupPool(
            Ledger(), minimum=2, max_staleness=settings.max_staleness, stale_groups=settings.stale_groups
        )
        mixed = [Task(key=f"{kind}-{number}") for number in range(8) for kind in SECONDS]
        admission = Admission(
            fleet, pool, Curriculum(mixed, [], seed=1), settings=settings, lineage="l", next_group=0,
            progress=lambda: (progress[0], progress[1]),
        )  # fmt: skip
        pool.record_version(0, 0)
        tasks.start_soon(admission.run, anyio.Event())
        while progress[0] < settings.steps:
            while not (groups := pool.take(settings.groups, progress[0])):
                await pool.changed.wait()
            await anyio.sleep(STEP_SECONDS)
            trained.update(kind_of(group.graded[0].task_key) for group in groups)
            pool.settle(groups)
            progress[0] = progress[1] = progress[0] + 1
            pool.record_version(progress[1], progress[0])
        tasks.cancel_scope.cancel()
    wanted = Counter(kind_of(request.task.key) for request in fleet.asked if request.sample_index == 0)
    return wanted, trained, pool


def kind_of(task: str) -> str:
    return task.partition("-")[0]


async def test_with_the_defaults_slow_tasks_are_trained_as_often_as_they_were_asked_for() -> None:
    wanted, trained, pool = await train(LearnerSettings(groups=8, group_size=4, steps=40))
    asked, found = (counts["slow"] / counts.total() for counts in (wanted, trained))
    assert asked == pytest.approx(0.5, abs=0.05)
    assert abs(found - asked) < 0.05
    assert pool.losses.metrics["lost_share"] == 0.0


async def test_dropping_stale_groups_leaves_the_slow_tasks_out_and_says_which() -> None:
    _, trained, pool = await train(LearnerSettings(groups=8, group_size=4, steps=40, stale_groups="drop"))
    assert trained["slow"] / trained.total() < 0.4
    assert pool.losses.metrics["tasks_losing"] == 8.0 and "slow-" in pool.losses.describe()
