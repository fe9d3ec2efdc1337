"""Sessions that end before their time: by the episode's deadline, by an order to cancel, by a worker that drains."""

from __future__ import annotations

import anyio
import pytest

import fleetbus_workers.environment.episode.attempts as attempts
from fleetbus.bus.base import Bus
from fleetbus.config.settings import LimitSettings
from fleetbus.core.episode.claims import EpisodeState
from fleetbus.log.episodes import read_episode_state
from fleetbus_schemas import Subjects, Task
from tests.support.faulty_sessions import (
    BEFORE_THE_VERDICT,
    FaultyStages,
    StuckOnce,
    assert_not_graded,
    hang,
    make_sleeping,
    play_episode,
    start_deployment,
)
from tests.support.small_deployment import small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


# The deadline


@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_the_episodes_deadline_ends_whatever_stage_it_is_in(stage: str) -> None:
    result = await play_episode(FaultyStages(**{stage: hang}), deadline_seconds=3)
    assert_not_graded(result, "timeout", "episode_timeout")


async def test_the_episodes_deadline_ends_the_wait_for_an_action() -> None:
    async with start_deployment(FaultyStages(), sampler=StuckOnce()) as fleet:
        started = anyio.current_time()
        await fleet.request(deadline_seconds=3)
        assert_not_graded(await fleet.result(), "timeout", "episode_timeout")
        assert anyio.current_time() - started == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("stage", ["verify", "close"])
async def test_what_was_played_in_time_is_still_graded_and_closed_after_the_deadline(stage: str) -> None:
    result = await play_episode(FaultyStages(**{stage: make_sleeping(4)}), deadline_seconds=3)
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_a_request_that_waited_past_its_deadline_is_not_begun() -> None:
    stage = FaultyStages()
    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            await fleet.request(deadline_seconds=3)
            await anyio.sleep(4)
            fleet.environment("environment-0", make=stage)
            result = await fleet.result()
            assert_not_graded(result, "timeout", "episode_timeout")
            assert (result.attempts, stage.entered) == (0, [])
            assert "before it was started" in result.error
            await fleet.check_at_rest()


# Cancellation


@pytest.mark.parametrize("stage", [*BEFORE_THE_VERDICT, "verify", "close"])
async def test_an_episode_cancelled_in_any_stage_ends_as_cancelled(stage: str) -> None:
    at = FaultyStages(**{stage: make_sleeping(4)})
    async with start_deployment(at) as fleet:
        await fleet.request()
        await at.begun.wait()
        answer = await fleet.control(fleet.members["environment-0"], "cancel", "e", "another")
        assert (answer.done, answer.detail) == (True, "e")
        assert_not_graded(await fleet.result(), "cancelled", "cancelled")


async def test_an_episode_cancelled_while_it_waits_for_an_action_ends_as_cancelled() -> None:
    sampler = StuckOnce()
    async with start_deployment(FaultyStages(), sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=20)
        await anyio.sleep(2)
        await fleet.control(fleet.members["environment-0"], "cancel", "e")
        assert_not_graded(await fleet.result(), "cancelled", "cancelled")
        await anyio.sleep(20)


async def test_an_order_to_cancel_is_kept_while_the_log_is_away() -> None:
    """Longer than a question to it is waited for; the episode is not played again when the log is back."""
    at = FaultyStages(step=make_sleeping(4))
    async with start_deployment(at) as fleet:
        worker = fleet.members["environment-0"]
        await fleet.request()
        await at.begun.wait()
        answer = await fleet.control(worker, "cancel", "e")
        assert answer.detail == "e"
        worker.cut()
        await anyio.sleep(40)
        worker.mend()
        result = await fleet.result()
        assert_not_graded(result, "cancelled", "cancelled")
        assert result.attempts == 1


async def test_an_order_to_cancel_is_kept_where_the_replica_that_answers_does_not_show_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result that it expects to be the first entry is refused; the episode would be played on at its next delivery."""
    at, before = FaultyStages(step=make_sleeping(4)), iter((EpisodeState(), EpisodeState()))

    async def read_lagging(bus: Bus, subjects: Subjects, episode_id: str) -> EpisodeState:
        return next(before, None) or await read_episode_state(bus, subjects, episode_id)

    async with start_deployment(at) as fleet:
        await fleet.request()
        await at.begun.wait()
        monkeypatch.setattr(attempts, "read_episode_state", read_lagging)
        await fleet.control(fleet.members["environment-0"], "cancel", "e")
        result = await fleet.result()
        assert_not_graded(result, "cancelled", "cancelled")
        assert result.attempts == 1
        assert next(before, None) is None


async def test_cancelling_an_episode_that_does_not_run_here_says_so() -> None:
    async with start_deployment(FaultyStages()) as fleet:
        await fleet.request()
        await fleet.result()
        answer = await fleet.control(fleet.members["environment-0"], "cancel", "e")
        assert (answer.done, answer.detail) == (False, "")


# Draining


@pytest.mark.parametrize("stage", [*BEFORE_THE_VERDICT, "verify", "close"])
async def test_a_draining_worker_finishes_what_ends_in_time(stage: str) -> None:
    at = FaultyStages(**{stage: make_sleeping(2)})
    async with start_deployment(at) as fleet:
        worker = fleet.members["environment-0"]
        await fleet.request(task=Task(key="task", config={"turns": 1}))
        await at.begun.wait()
        worker.drain.set()
        result = await fleet.result()
        await worker.ended.wait()
        assert (result.outcome, result.attempts) == ("completed", 1)
        assert worker.error is None


@pytest.mark.parametrize("stage", [*BEFORE_THE_VERDICT, "verify", "close"])
async def test_a_draining_worker_hands_back_what_does_not_end_and_another_plays_it_at_once(stage: str) -> None:
    at = FaultyStages(**{stage: hang})
    limits = LimitSettings(open=30, reset=30, step=30, action=30, verify=8, close=8, drain=3)
    async with start_deployment(at, limits=limits) as fleet:
        worker = fleet.members["environment-0"]
        await fleet.request()
        await at.begun.wait()
        await fleet.heard(fleet.environment("environment-1"))
        worker.drain.set()
        result = await fleet.result()
        await worker.ended.wait()
        claims = await fleet.claims()
        assert (result.outcome, result.worker, result.attempts) == ("completed", "environment-1", 2)
        assert [claim.reason for claim in claims] == ["fresh", "handed_back"]
        assert (await fleet.episode_state()).losses == 1, "a hand-back counts as no loss"
        assert fleet.finished_at["e"] == pytest.approx(anyio.current_time(), abs=0.5), "it was not played at once"


async def test_a_worker_drained_while_it_waits_for_an_action_hands_back_and_the_turn_is_asked_again() -> None:
    sampler = StuckOnce()
    limits = LimitSettings(action=60, drain=3)
    async with start_deployment(FaultyStages(), sampler=sampler, limits=limits) as fleet:
        await fleet.request(deadline_seconds=40)
        await anyio.sleep(1)
        await fleet.heard(fleet.environment("environment-1"))
        await fleet.drain_members([fleet.members["environment-0"]])
        result = await fleet.result()
        assert (result.outcome, result.worker) == ("completed", "environment-1")
        await anyio.sleep(40)
