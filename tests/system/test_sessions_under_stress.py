"""Sessions under stress: each stage hangs, raises or gives nonsense. Sessions that are ended: `test_sessions_ended_early.py`.

All on virtual time. After each test everything has come to rest: slots, sessions, leases, requests, environments, tasks.
"""

from __future__ import annotations

import math

import anyio
import msgspec
import pytest

from fleetbus.core.training.evaluation_summary import summarise_results
from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from tests.support.faulty_sessions import (
    BEFORE_THE_VERDICT,
    FaultyStages,
    StuckOnce,
    assert_not_graded,
    hang,
    make_raising,
    make_returning,
    make_sleeping,
    play_episode,
    start_deployment,
)
from tests.support.small_deployment import LIMITS, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


# A stage hangs


@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_a_stage_that_hangs_is_a_timeout_named_after_it(stage: str) -> None:
    result = await play_episode(FaultyStages(**{stage: hang}))
    assert_not_graded(result, "timeout", f"{stage}_timeout")
    assert result.timings[stage] == pytest.approx(5)


async def test_an_action_that_never_comes_is_a_timeout() -> None:
    """The inference worker lives, holds the observation and never answers: nobody else is asked, the limit ends it."""
    stage, sampler = FaultyStages(), StuckOnce()
    async with start_deployment(stage, sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=20)
        assert_not_graded(await fleet.result(), "timeout", "action_timeout")
        await anyio.sleep(20)  # what the sampler holds ends with the episode's deadline
    assert sampler.asked == 1


async def test_an_environment_that_nobody_calls_for_too_long_is_a_timeout_counted_from_the_end_of_its_last_call() -> None:
    """Its reset takes longer than it may be idle, and does not count."""
    limits = msgspec.structs.replace(LIMITS, idle=3, action=20)
    stage, sampler = FaultyStages(reset=make_sleeping(4)), StuckOnce()
    async with start_deployment(stage, sampler=sampler, limits=limits) as fleet:
        await fleet.request(deadline_seconds=60)
        result = await fleet.result()
        assert_not_graded(result, "timeout", "idle_timeout")
        assert result.timings["action"] == pytest.approx(3)
        await anyio.sleep(60)


async def test_a_verification_that_hangs_leaves_no_reward() -> None:
    result = await play_episode(FaultyStages(verify=hang))
    assert_not_graded(result, "verifier_unknown", "no_verdict")
    assert "verify_timeout" in result.error


async def test_a_close_that_hangs_changes_no_outcome() -> None:
    result = await play_episode(FaultyStages(close=hang))
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert result.timings["close"] == pytest.approx(5)


# A stage raises


@pytest.mark.parametrize(
    "error", [ValueError("no"), EnvironmentFailed("gone"), ExceptionGroup("two", [OSError("lost")])], ids=repr
)
@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_a_stage_that_raises_is_a_failure_of_the_environment(stage: str, error: Exception) -> None:
    result = await play_episode(FaultyStages(**{stage: make_raising(error)}))
    expected = "OSError" if isinstance(error, ExceptionGroup) else type(error).__name__
    assert_not_graded(result, "env_failed", expected)
    assert result.error.startswith(f"{stage}: ")


async def test_a_verification_that_raises_leaves_no_reward() -> None:
    assert_not_graded(await play_episode(FaultyStages(verify=make_raising(ValueError("no")))), "verifier_unknown", "no_verdict")


async def test_a_close_that_raises_changes_no_outcome() -> None:
    result = await play_episode(FaultyStages(close=make_raising(ValueError("no"))))
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_an_environment_that_cannot_even_be_made_is_a_failure_of_the_environment() -> None:
    def make() -> ScriptedEnvironment:
        raise ImportError("no such simulator")

    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            fleet.environment("environment-0", make=make)
            await fleet.request()
            assert_not_graded(await fleet.result(), "env_failed", "ImportError")
            await fleet.check_at_rest()


async def test_an_error_text_that_has_no_bytes_is_recorded_all_the_same() -> None:
    result = await play_episode(FaultyStages(step=make_raising(OSError("no file \udcff"))))
    assert_not_graded(result, "env_failed", "OSError")
    assert "no file ?" in result.error


# A stage gives nonsense


@pytest.mark.parametrize(
    "verdict", [Verdict(reward=None, reason="?"), Verdict(reward=math.nan), Verdict(reward=-math.inf)], ids=repr
)
async def test_a_verdict_that_is_no_number_leaves_no_reward(verdict: Verdict) -> None:
    assert_not_graded(await play_episode(FaultyStages(verify=make_returning(verdict))), "verifier_unknown", "no_verdict")


@pytest.mark.parametrize("verdict", [1.0, "1.0", Verdict(reward="1.0")], ids=repr)  # type: ignore[arg-type]
async def test_a_verdict_of_the_wrong_type_leaves_no_reward(verdict: object) -> None:
    assert_not_graded(await play_episode(FaultyStages(verify=make_returning(verdict))), "verifier_unknown", "no_verdict")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_turn_reward_that_is_not_finite_voids_the_episode(reward: float) -> None:
    assert_not_graded(
        await play_episode(FaultyStages(step=make_returning(Step(reward=reward)))), "verifier_unknown", "reward_not_finite"
    )


@pytest.mark.parametrize(
    ("stage", "value"),
    [
        ("reset", "hello"),
        ("reset", Start(messages="hello")),  # type: ignore[arg-type]
        ("step", "hello"),
        ("step", Step(reward="1.0")),  # type: ignore[arg-type]
        ("step", Step(tool_calls="1")),  # type: ignore[arg-type]
        ("step", Step(messages=("hello",))),  # type: ignore[arg-type]
    ],
    ids=repr,
)
async def test_an_answer_of_the_wrong_type_is_a_failure_of_the_environment(stage: str, value: object) -> None:
    result = await play_episode(FaultyStages(**{stage: make_returning(value)}))
    assert result.outcome == "env_failed"
    assert result.reward is None


async def test_an_observation_of_ten_megabytes_is_cut_and_the_episode_goes_on() -> None:
    stage = FaultyStages()
    content = "ß" * 5_000_000

    async def once() -> Step | None:
        await anyio.lowlevel.checkpoint()
        return Step(messages=(ChatMessage(role="user", content=content),)) if stage.entered.count("step") == 1 else None

    stage.trouble["step"] = once
    async with start_deployment(stage, observation_bytes=1024) as fleet:
        await fleet.request()
        assert (await fleet.result()).outcome == "truncated"  # by the tokens of a 1024-token model, not by a failure
        seen = [observation.messages[0].content for observation in await fleet.observations()]
    assert seen[1] == "ß" * 512 + f"\n[cut: {10_000_000 - 1024} more bytes]"


@pytest.mark.parametrize(
    "messages",
    [
        (ChatMessage(role="user", content="x" * 30_000),) * 100,
        (ChatMessage(role="tool", content="", tool_call_id="x" * 10_000_000),),
        (ChatMessage(role="user", content="\ud800"),),
    ],
    ids=["many messages", "one id", "no bytes"],
)
async def test_an_observation_that_cannot_travel_ends_its_episode_alone(messages: tuple[ChatMessage, ...]) -> None:
    result = await play_episode(FaultyStages(step=make_returning(Step(messages=messages))))
    assert_not_graded(result, "env_failed", "MalformedMessage")


@pytest.mark.parametrize("grade", [0.0, 1.0, None])
async def test_an_episode_whose_prompt_is_too_long_is_no_zero_and_says_how_long_it_is(grade: float | None) -> None:
    start = Start(messages=(ChatMessage(role="user", content="x" * 5000),))
    verdict = Verdict(reward=grade, reason="nothing was played")
    result = await play_episode(FaultyStages(reset=make_returning(start), verify=make_returning(verdict)))
    assert_not_graded(result, "verifier_unknown", "prompt_too_long")
    assert "the prompt leaves no room for a turn" in result.error
    assert "the prompt has 5," in result.error and "(inference.max_model_len)" in result.error
    assert (result.turns, result.actions, result.tokens) == (0, (), 0)

    played = await play_episode(FaultyStages(verify=make_returning(Verdict(reward=1.0))))
    summary = summarise_results([result, played], [1])
    assert (summary.mean_reward, summary.graded, summary.episodes) == (1.0, 1, 2), "the mean is that of graded episodes"
    assert summary.not_graded == {"verifier_unknown": 1}
