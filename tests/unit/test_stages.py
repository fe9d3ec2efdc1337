"""Stages: time limits, exceptions and timings of one environment call after another, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.config.settings import LimitSettings
from fleetbus_workers.environment.adapter_context import Factory
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.composed_reward import ComposedRewardFactory
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages, Superseded, find_root_cause, to_printable
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def test_a_stage_within_its_limit_is_timed() -> None:
    stages = Stages()
    with stages.time_limit("open", 5):
        await anyio.sleep(2)
    assert stages.timings == {"open": pytest.approx(2)}


async def test_times_of_a_repeated_stage_add_up() -> None:
    stages = Stages()
    for seconds in (1, 2, 3):
        with stages.time_limit("step", 5):
            await anyio.sleep(seconds)
    assert stages.timings == {"step": pytest.approx(6)}


async def test_a_stage_that_takes_too_long_is_a_timeout_named_after_it() -> None:
    stages = Stages()
    with pytest.raises(EpisodeEnded) as ended, stages.time_limit("reset", 5):
        await anyio.sleep_forever()
    assert (ended.value.outcome, ended.value.error_class) == ("timeout", "reset_timeout")
    assert stages.timings == {"reset": pytest.approx(5)}


async def test_a_stage_that_raises_is_a_failure_of_the_environment_with_its_cause() -> None:
    with pytest.raises(EpisodeEnded) as ended, Stages().time_limit("step", 5):
        raise ZeroDivisionError("nothing there")
    assert (ended.value.outcome, ended.value.error_class) == ("env_failed", "ZeroDivisionError")
    assert ended.value.error == "step: nothing there"


async def test_of_a_group_of_exceptions_the_first_leaf_is_told() -> None:
    with pytest.raises(EpisodeEnded) as ended, Stages().time_limit("step", 5):
        async with anyio.create_task_group():
            raise OSError("the socket is gone")
    assert ended.value.error_class == "OSError"
    nested = ExceptionGroup("a", [ExceptionGroup("b", [KeyError("c"), ValueError("d")])])
    assert isinstance(find_root_cause(nested), KeyError)


async def test_what_an_environment_raises_because_its_time_was_up_is_still_a_timeout() -> None:
    with pytest.raises(EpisodeEnded) as ended, Stages().time_limit("step", 5):
        try:
            await anyio.sleep_forever()
        finally:
            raise RuntimeError("interrupted in mid-sentence")
    assert (ended.value.outcome, ended.value.error_class) == ("timeout", "step_timeout")


@pytest.mark.parametrize("passed_on", [EpisodeEnded("lost", "diverged"), Superseded("attempt 1 is over")], ids=type)
async def test_what_the_session_itself_decides_passes_through(passed_on: Exception) -> None:
    with pytest.raises(type(passed_on)) as raised, Stages().time_limit("action", 5):
        raise passed_on
    assert raised.value is passed_on


async def test_cancellation_from_outside_is_no_timeout_and_still_timed() -> None:
    stages = Stages()
    with anyio.move_on_after(1) as scope, stages.time_limit("open", 5):
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert stages.timings == {"open": pytest.approx(1)}


async def test_a_shielded_stage_is_finished_despite_a_cancellation_but_not_without_limit() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        stages = Stages()
        with stages.time_limit("close", 5, shield=True):
            await anyio.sleep(1)
        with pytest.raises(EpisodeEnded), stages.time_limit("verify", 5, shield=True):
            await anyio.sleep_forever()
    assert stages.timings == {"close": pytest.approx(1), "verify": pytest.approx(5)}


async def test_an_error_that_has_no_bytes_is_made_printable() -> None:
    ended = EpisodeEnded("env_failed", "OSError", "no file \udcff" + "x" * 2000)
    assert ended.error.encode() == b"no file ?" + b"x" * 991
    assert to_printable("plain ß") == "plain ß"


@asynccontextmanager
async def open_stages(*, end: float = 100.0) -> AsyncIterator[Stages]:
    """Stages under one deadline, which ends after that many seconds."""
    deadlines, stages = Deadlines(), Stages()
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(anyio.create_task_group())
        group.start_soon(deadlines.run)
        with deadlines.open(stages.now() + end) as stages.deadline:
            yield stages
        group.cancel_scope.cancel()


async def hang() -> None:
    await anyio.sleep_forever()


async def hang_in_a_group() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)


async def fail_when_interrupted() -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise RuntimeError("interrupted in mid-sentence")


async def fail_beside_others_when_interrupted() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        await fail_when_interrupted()


async def return_although_interrupted() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(8)


LATE = [hang, hang_in_a_group, fail_when_interrupted, fail_beside_others_when_interrupted, return_although_interrupted]


@pytest.mark.parametrize("late", LATE)
async def test_under_one_deadline_each_stage_has_its_own_limit(late: Callable[[], object]) -> None:
    async with open_stages() as stages:
        for _ in range(30):
            with stages.time_limit("step", 5):
                await anyio.sleep(1)
        with pytest.raises(EpisodeEnded) as ended, stages.time_limit("reset", 5):
            await late()  # type: ignore[misc]
    assert (ended.value.outcome, ended.value.error_class) == ("timeout", "reset_timeout")
    assert stages.timings == {
        "step": pytest.approx(30),
        "reset": pytest.approx(8 if late is return_although_interrupted else 5),
    }


@pytest.mark.parametrize("late", LATE)
async def test_a_stage_that_lasts_beyond_the_whole_is_ended_with_it(late: Callable[[], object]) -> None:
    async with open_stages(end=3) as stages:
        with pytest.raises(EpisodeEnded) as ended, stages.time_limit("reset", 5):
            await late()  # type: ignore[misc]
    assert (ended.value.outcome, ended.value.error_class) == ("timeout", "episode_timeout")


async def test_between_two_stages_the_limit_of_the_whole_holds_and_no_other() -> None:
    reached = 0.0
    async with open_stages(end=10) as stages:
        with stages.time_limit("step", 5):
            await anyio.sleep(1)
        try:
            await anyio.sleep_forever()
        finally:
            reached = stages.now()
            assert stages.deadline is not None
            assert stages.deadline.is_whole_over
    assert reached == pytest.approx(10)


async def test_an_earlier_limit_is_kept_by_a_timer_that_waits_for_a_later_one() -> None:
    async with open_stages(end=1000) as stages:
        await anyio.sleep(1)
        for seconds in (50, 5, 0.5):
            with stages.time_limit("step", seconds):
                await anyio.sleep(seconds / 2)
        with pytest.raises(EpisodeEnded, match=r"step took longer than 0\.5 s"), stages.time_limit("step", 0.5):
            await anyio.sleep_forever()


async def test_under_one_deadline_a_failure_and_a_cancellation_from_outside_stay_what_they_are() -> None:
    async with open_stages() as stages:
        with pytest.raises(EpisodeEnded) as ended, stages.time_limit("step", 5):
            raise ZeroDivisionError("nothing there")
        with pytest.raises(Superseded), stages.time_limit("action", 5):
            raise Superseded("attempt 1 is over")
        with anyio.move_on_after(1) as scope, stages.time_limit("open", 5):
            await anyio.sleep_forever()
    assert ended.value.error_class == "ZeroDivisionError"
    assert scope.cancelled_caught


class OwnPace(ScriptedEnvironment):
    paces_itself = True


async def test_a_step_that_another_package_paces_may_take_as_long_as_the_episode() -> None:
    limits, stages = LimitSettings(step=5, episode=60), Stages()
    with stages.limit_step(OwnPace(), limits):
        await anyio.sleep(50)
    with pytest.raises(EpisodeEnded, match=r"episode took longer than 60 s: raise limits\.episode"):
        with stages.limit_step(OwnPace(), limits):
            await anyio.sleep_forever()
    with pytest.raises(EpisodeEnded, match=r"step took longer than 5 s: raise limits\.step"):
        with stages.limit_step(ScriptedEnvironment(), limits):
            await anyio.sleep(50)


async def test_rewards_that_are_composed_leave_an_environment_its_pace() -> None:
    for kind, seconds in ((OwnPace, 60), (ScriptedEnvironment, 5)):
        composed = ComposedRewardFactory(Factory(kind), {}, None, max_chars=9)()
        with pytest.raises(EpisodeEnded, match=f"took longer than {seconds} s"):
            with Stages().limit_step(composed, LimitSettings(step=5, episode=60)):
                await anyio.sleep_forever()


async def test_a_stage_without_a_limit_of_its_own_names_the_one_that_it_has() -> None:
    with pytest.raises(EpisodeEnded, match=r"state took longer than 5 s: raise limits\.step"), Stages().time_limit("state", 5):
        await anyio.sleep_forever()
