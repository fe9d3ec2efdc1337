"""A learner's heartbeats say whether it works or waits for episodes: `up` ends no run whose learner trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import PublishAck
from fleetbus.bus.memory import MemoryBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.errors import LogFull
from fleetbus_schemas import Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.journal import WAITS_FOR_ROOM
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, run_inline, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

TASKS = [Task(key="task", prompt="play")]


def count_work(fleet: SmallDeployment) -> int:
    """Blocks of work that the learner's newest heartbeat has begun and not ended; -1 before any."""
    beat = fleet.beats.get("learner-0")
    return -1 if beat is None else int(beat.counters.get("begun_work", 0.0) - beat.counters.get("ended_work", 0.0))


async def test_a_learner_says_that_it_works_for_as_long_as_a_step_takes_and_not_while_it_waits_for_episodes(
    tmp_path: Path,
) -> None:
    trainer, may_train = ScriptedTrainer(), anyio.Event()

    async def offload(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if trainer in args:
            await may_train.wait()
        return await run_inline(function, *args, **options)

    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=1, groups=1, group_size=2),
        evaluation=EvaluationSettings(episodes=0),
    )
    with anyio.fail_after(600):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.runtime = Runtime(offload=offload, nonce=lambda: "nonce")
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            await fleet.until(lambda: count_work(fleet) == 0)
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            await fleet.until(lambda: count_work(fleet) == 1)
            assert trainer.updates == 0
            may_train.set()
            await learner.ended.wait()
            assert trainer.updates == 1


async def test_a_learner_whose_step_finds_no_room_in_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, trainer, has_room = MemoryBus.publish, ScriptedTrainer(), False

    async def find_room(bus: MemoryBus, subject: str, payload: bytes, **options: Any) -> PublishAck:
        if trainer.updates and ".train." in subject and not has_room:
            raise LogFull("maximum bytes exceeded")
        return await publish(bus, subject, payload, **options)

    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=2, groups=1, group_size=2),
        evaluation=EvaluationSettings(episodes=0),
    )
    monkeypatch.setattr(MemoryBus, "publish", find_room)
    with anyio.fail_after(600):
        async with small_deployment(configuration, published=False) as fleet:
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            await fleet.until(lambda: "learner-0" in fleet.beats and fleet.beats["learner-0"].problem == WAITS_FOR_ROOM)
            assert count_work(fleet) == 1
            has_room = True
            await learner.ended.wait()
