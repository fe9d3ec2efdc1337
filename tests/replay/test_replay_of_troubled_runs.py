"""Runs in which something went wrong are replayed, too: what has a cause inside is compared, the rest is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.recording import Recording, RecordingHeader
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.environment_driver import replay_environment
from fleetbus_workers.replay.inference_driver import replay_inference
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.report import Report
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


def slow(request: GenerationRequest) -> float:
    return 1.0


async def recorded(fleet: SmallDeployment) -> Recording:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    return Recording(path=Path("in-memory"), header=RecordingHeader(run=RUN), entries=entries)


async def replayed(recording: Recording, turns: int = 5) -> Report:
    return await played(recording, lambda: ScriptedEnvironment(turns))


async def played(recording: Recording, make: Callable[[], Environment]) -> Report:
    context = ReplayContext(recording, Replay(patience_seconds=30))
    await replay_environment(context, make)
    return context.report


async def answered(recording: Recording, sampler: ScriptedSampler) -> Report:
    context = ReplayContext(recording, Replay(role="inference", patience_seconds=30))
    await replay_inference(context, sampler, ScriptedTemplate())
    return context.report


async def taken_over(*, task: Task | None = None) -> Recording:
    """One episode of five turns, whose first worker is killed in the middle."""
    async with small_deployment(build_configuration()) as fleet:
        first = fleet.environment("first", make=lambda: ScriptedEnvironment(5))
        fleet.inference("inf", sampler=ScriptedSampler(delay=slow))
        await fleet.request("e", task=task)
        while len(await fleet.actions()) < 2:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        first.kill()
        fleet.environment("second", make=lambda: ScriptedEnvironment(5))
        result = await fleet.result("e")
        assert (result.outcome, result.attempts, result.worker) == ("completed", 2, "second")
        return await recorded(fleet)


async def test_an_episode_that_was_taken_over_replays_along_its_final_history() -> None:
    report = await replayed(await taken_over())
    report.check()
    assert report.compared == {"Observation": 5, "EpisodeFinished": 1}


async def test_a_change_after_the_take_over_is_found() -> None:
    report = await replayed(await taken_over(), turns=4)
    assert not report.same and report.first is not None
    assert report.first.episode_id == "e"


async def test_its_actions_replay_from_the_seeds_whoever_sampled_them() -> None:
    recording = await taken_over()
    report = await answered(recording, ScriptedSampler())
    report.check()
    assert report.compared == {"Action": 5}


async def test_a_sampler_that_draws_otherwise_is_found() -> None:
    recording = await taken_over()
    report = await answered(recording, ScriptedSampler(tokens=7))
    assert report.first is not None and report.first.field.startswith("sampled")


async def test_what_ended_from_outside_is_left_out_with_its_reason() -> None:
    async with small_deployment(build_configuration()) as fleet:
        worker = fleet.environment("env", make=lambda: ScriptedEnvironment(5))
        fleet.inference("inf", sampler=ScriptedSampler(delay=slow))
        await fleet.heard(*fleet.members.values())
        await fleet.request("cancelled")
        await fleet.request("whole")
        await anyio.sleep(1.5)
        await fleet.control(worker, "cancel", "cancelled")
        await fleet.all_results(2)
        recording = await recorded(fleet)
    report = await replayed(recording)
    report.check()
    assert report.skipped == {"episodes with outcome cancelled": 1} and report.compared["EpisodeFinished"] == 1


async def test_a_recording_that_ends_in_mid_episode_is_compared_as_far_as_it_goes() -> None:
    recording = await taken_over()
    acted = [index for index, entry in enumerate(recording.entries) if ".act." in entry.subject]
    recording.entries = recording.entries[: acted[2]]
    report = await replayed(recording)
    assert not report.differences and report.compared["Observation"] == 3


@pytest.mark.parametrize("acted", [1, 2, 5])
async def test_an_action_of_which_nothing_was_recorded_any_more_ends_the_comparison(acted: int) -> None:
    """The worker was ended between an Action and what it made of it."""
    recording = await taken_over()
    places = [index for index, entry in enumerate(recording.entries) if ".act." in entry.subject]
    recording.entries = recording.entries[: places[acted - 1] + 1]
    report = await replayed(recording)
    report.check()
    assert report.compared == {"Observation": acted}
    assert report.skipped == {"episodes to their end, which was not recorded": 1}


async def test_an_episode_that_ends_before_the_end_of_its_recording_is_found_without_a_recorded_result() -> None:
    recording = await taken_over()
    places = [index for index, entry in enumerate(recording.entries) if ".act." in entry.subject]
    recording.entries = recording.entries[: places[4] + 1]
    first = (await replayed(recording, turns=2)).first
    assert first is not None and first.message == "Observation of turn 2 of episode e"
    assert first.replayed.startswith("EpisodeFinished completed")


async def test_an_environment_that_fails_fails_again_the_same_way() -> None:
    class Broken(ScriptedEnvironment):
        async def step(self, action: Any) -> Any:
            if self._played == 1:
                raise RuntimeError("no such room")
            return await super().step(action)

    async with small_deployment(build_configuration()) as fleet:
        fleet.environment("env", make=lambda: Broken(3))
        fleet.inference("inf")
        await fleet.request("e")
        assert (await fleet.result("e")).outcome == "env_failed"
        recording = await recorded(fleet)
    again = await played(recording, lambda: Broken(3))
    again.check()
    mended = await played(recording, lambda: ScriptedEnvironment(3))
    assert mended.first is not None and "EpisodeFinished" in mended.first.message
