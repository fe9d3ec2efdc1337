"""A server that is away for minutes, as in an upgrade or a cut network: nobody dies of it, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

AWAY_SECONDS = 600.0
TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]

anyio_backend = virtual_time


async def train(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch | None = None) -> ScriptedTrainer:
    """A run whose server is away for ten minutes after so many seconds, or whenever the learner reads the log."""
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=6, groups=2, group_size=2, checkpoint_every=2, max_staleness=1),
        evaluation=EvaluationSettings(episodes=2),
    )
    trainer = ScriptedTrainer()
    with anyio.fail_after(20_000):
        async with small_deployment(configuration, published=False) as fleet:
            if monkeypatch is not None:
                away_whenever_the_log_is_read(fleet, monkeypatch)
            fleet.environment("environment-0")
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 0.4))
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, TASKS, seed=1))
            if monkeypatch is None:
                await anyio.sleep(seconds)
                fleet.server.kill()
                await anyio.sleep(AWAY_SECONDS)
                fleet.server.restart()
            await learner.ended.wait()
            assert learner.error is None
            assert not [member.name for member in fleet.members.values() if member.error]
            assert (await audit_run(fleet.bus, fleet.subjects)).balanced
    return trainer


def away_whenever_the_log_is_read(fleet: SmallDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server dies just as the learner asks for the Actions of a batch."""
    history = MemoryBus.history

    async def dying(bus: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
        of_learner = bus._worker == "learner-0" and ".act." in subjects[0]
        if of_learner and (bus._link.up and anyio.current_time() > spared["until"]):
            fleet.server.kill()
            fleet._group.start_soon(come_back)
        return await history(bus, subjects)

    async def come_back() -> None:
        await anyio.sleep(AWAY_SECONDS)
        spared["until"] = anyio.current_time() + 5
        fleet.server.restart()

    spared = {"until": 0.0}
    monkeypatch.setattr(MemoryBus, "history", dying)


@pytest.mark.parametrize("seconds", [0.05 + 1.9 * number for number in range(3)])
async def test_ten_minutes_without_a_server_and_every_worker_lives_and_training_ends(seconds: float, tmp_path: Path) -> None:
    assert (await train(tmp_path, seconds)).updates == 6


async def test_a_server_that_goes_away_whenever_a_batch_is_read_delays_training_and_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await train(tmp_path, 0, monkeypatch)).updates == 6
