"""Environments that fail for a long time, as when their service is down over night: the run outlives it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, NatsSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner import pool
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import LANES, RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]
OUTAGE_SECONDS = 1200.0

anyio_backend = virtual_time


class ServiceDown(ScriptedEnvironment):
    """Nothing can be opened before some instant."""

    back_at = 0.0

    async def open(self, task: Task) -> None:
        if anyio.current_time() < self.back_at:
            await anyio.sleep(0.5)
            raise ConnectionError("the service is down")
        await super().open(task)


@pytest.mark.integration
async def test_a_long_outage_of_the_environments_does_not_fill_the_log_with_failures(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        nats=NatsSettings(lanes=LANES, max_bytes=1 << 20),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=4, groups=2, group_size=2, checkpoint_every=2, max_staleness=1),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = ScriptedTrainer()
    with anyio.fail_after(OUTAGE_SECONDS + 600):
        async with small_deployment(configuration, published=False) as fleet:
            ServiceDown.back_at = anyio.current_time() + OUTAGE_SECONDS
            fleet.environment("environment-0", make=ServiceDown)
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 0.4))
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            await learner.ended.wait()
            assert learner.error is None
            assert trainer.updates == 4
            assert anyio.current_time() < ServiceDown.back_at + 120, "it took long to notice that the service is back"


async def test_more_exclusions_than_an_entry_holds_are_spread_over_entries_also_across_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose entry could not be encoded would end the learner, and every one after it at the same step."""
    monkeypatch.setattr(pool, "EXCLUSIONS_PER_ENTRY", 5)
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=4, groups=2, group_size=2, checkpoint_every=1, max_staleness=1),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer, curriculum = ScriptedTrainer(), Curriculum(TASKS, [], seed=1)
    with anyio.fail_after(900):
        async with small_deployment(configuration, published=False) as fleet:
            ServiceDown.back_at = anyio.current_time() + 60
            fleet.environment("environment-0", make=ServiceDown)
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 0.4))
            first = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=curriculum)
            async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
                while b"StepTrained" not in (await reader.receive()).payload:
                    pass
            first.kill()
            learner = fleet.learner("learner-1", trainer=trainer, curriculum=curriculum)
            await learner.ended.wait()
            assert learner.error is None
            report = await audit_run(fleet.bus, fleet.subjects)
    assert report.balanced, report.findings
    assert report.books.trained == 4 * 2 * 2
    assert sum(report.books.excluded.values()) > 4 * 5
