"""A fleet whose reads of the log lag, as those of a replica may: no answer that is too old ends an episode or loses a turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryBus
from fleetbus.bus.streams import observations_consumer
from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import CheckpointStored, EpisodeRequested, LineageStarted, Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.checkpoints import Checkpoint, write_checkpoint
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_failure_table_learner import training

PATIENT = LimitSettings(action=300, drain=10)

anyio_backend = virtual_time


def lag_behind(patch: pytest.MonkeyPatch, role: str, seconds: float) -> None:
    """Single entries and histories that workers of this role read are as old as this, whatever they have stored themselves."""
    history = MemoryBus.history

    async def lagging_history(self: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
        entries = await history(self, subjects)
        behind_ns = int(seconds * 1e9) if self._worker.startswith(role) else 0
        return [entry for entry in entries if entry.time_ns <= self.now_ns() - behind_ns]

    async def lagging_last(self: MemoryBus, subject: str) -> StreamEntry | None:
        entries = await lagging_history(self, [subject]) if subject.startswith("fb.") else await history(self, [subject])
        return entries[-1] if entries else None

    patch.setattr(MemoryBus, "history", lagging_history)
    patch.setattr(MemoryBus, "last", lagging_last)


@pytest.mark.parametrize("role", ["inference", "environment"])
@pytest.mark.parametrize("seconds", [0.3, 1.5, 5.0])
async def test_episodes_that_are_taken_over_complete_though_reads_lag(
    role: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers of an episode die; who goes on with it asks somebody who reads its history from a replica that lags."""
    lag_behind(monkeypatch, role, seconds)
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            players = [fleet.environment("environment-0"), fleet.inference("inference-0", sampler=slow())]
            for number in range(6):
                await fleet.request(f"e{number}", task=Task(key="t", prompt="play", config={"turns": 6}))
            await anyio.sleep(3.5)
            for player in players:
                player.kill()
            fleet.environment("environment-1")
            fleet.inference("inference-1", sampler=slow())
            results = await fleet.all_results(6)
            assert [result.outcome for result in results] == ["completed"] * 6
            assert max(fleet.finished_at.values()) < 120
            assert (await audit_run(fleet.bus, fleet.subjects)).balanced


def slow() -> ScriptedSampler:
    return ScriptedSampler(delay=lambda _: 1.0)


@pytest.mark.parametrize("what", ["acked without an answer", "lost by the log"])
async def test_an_observation_for_any_worker_that_will_reach_none_is_sent_again(what: str) -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            await fleet.request()
            async with fleet.bus.pull(observations_consumer("default", "any"), credits=1) as subscription:
                delivery = await subscription.receive()
                if what == "acked without an answer":
                    await delivery.ack()
                else:
                    await fleet.bus.purge(fleet.subjects.observations(), below=delivery.message.sequence + 1)
            fleet.inference("inference-0")
            assert (await fleet.result()).outcome == "completed"
            assert [observation.hop for observation in await fleet.observations()][-3:] == [1, 0, 0]


async def test_an_observation_that_waits_for_a_free_worker_is_not_sent_again() -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            await fleet.request()
            await anyio.sleep(120)
            fleet.inference("inference-0")
            assert (await fleet.result()).outcome == "completed"
            assert [observation.hop for observation in await fleet.observations()] == [0, 0, 0]


async def test_a_result_that_is_older_than_the_floor_of_a_learner_is_trained_though_its_first_read_lags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that was cut off had asked for the group after its successor began, and it was played; a third one, whose
    floor is behind it, asks for it again, and a replica that lags does not show the results."""
    async with training(tmp_path, steps=2, groups=1, group_size=2, checkpoint_every=1) as run:
        fleet = run.fleet
        for index in range(2):
            await fleet.stored(fleet.subjects.task("default", f"g000000-{index}"), stray(fleet.bus, index))
        await fleet.publish_policy()
        await fleet.all_results(2)
        floor = (await fleet.bus.log_state()).last_sequence + 1
        checkpoint = Checkpoint(lineage="l1", step=1, version=1, floor=floor, settled=(), next_group=0)
        file = write_checkpoint(tmp_path, checkpoint, ScriptedTrainer()).path
        for entry in (
            LineageStarted(lineage="l1", worker="l"),
            CheckpointStored(lineage="l1", step=1, version=1, file=str(file), floor=floor),
        ):
            await fleet.stored(fleet.subjects.train("default"), entry)
        history, lags_until = MemoryBus.history, anyio.current_time() + 10

        async def lagging(self: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
            entries = await history(self, subjects)
            lags = self._worker.startswith("learner") and anyio.current_time() < lags_until
            return [entry for entry in entries if not lags or ".episode." not in entry.subject]

        monkeypatch.setattr(MemoryBus, "history", lagging)
        soon = LimitSettings(episode=20, grace=5)
        fleet.configuration = msgspec.structs.replace(fleet.configuration, limits=soon)
        learner, trainer = run.begin()
        await learner.ended.wait()
        assert learner.error is None
        assert trainer.trained == ["g000000-0", "g000000-1"]


def stray(bus: Bus, index: int) -> EpisodeRequested:
    return EpisodeRequested(
        episode_id=f"g000000-{index}",
        group_id="g000000",
        sample_index=index,
        group_size=2,
        split="train",
        task=Task(key="t", prompt="play"),
        policy="default",
        deadline_ns=bus.now_ns() + 30 * 10**9,
        lineage="l1",
    )
