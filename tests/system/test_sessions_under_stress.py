"""Sessions under stress: each stage hangs, raises or gives nonsense; in each somebody cancels, drains or waits no longer.

All on virtual time. After each test everything has come to rest: slots, sessions, leases, requests, environments, tasks.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from schemas import Action, ChatMessage, EpisodeFinished, Task, Text
from tests.support.small_fleet import LIMITS, SmallFleet, configured, small_fleet
from workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from workers.environment.scripted import ScriptedEnvironment
from workers.inference.base import GenerationRequest
from workers.inference.scripted import ScriptedSampler

Trouble = Callable[[], Awaitable[Any]]
"""What happens in a stage instead of the usual; None as its value: the usual after all."""

BEFORE_THE_VERDICT = ("open", "reset", "step")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def hanging() -> None:
    await anyio.sleep_forever()


def raising(error: Exception) -> Trouble:
    async def trouble() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return trouble


def giving(value: Any) -> Trouble:
    async def trouble() -> Any:
        await anyio.lowlevel.checkpoint()
        return value

    return trouble


def lasting(seconds: float) -> Trouble:
    async def trouble() -> None:
        await anyio.sleep(seconds)

    return trouble


class Stage:
    """Where the environments of one test play: the trouble by stage, and what was opened and closed."""

    def __init__(self, **trouble: Trouble) -> None:
        self.trouble = trouble
        self.entered: list[str] = []
        self.begun = anyio.Event()
        self.opened = self.closed = 0

    def __call__(self) -> TroubledEnvironment:
        return TroubledEnvironment(self)

    async def enter(self, name: str) -> Any:
        """The stage's trouble, if any; ``begun`` tells that it has begun."""
        self.entered.append(name)
        if name in self.trouble:
            self.begun.set()
            return await self.trouble[name]()
        return None


class TroubledEnvironment(ScriptedEnvironment):
    """Three turns, with trouble in some stages."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    async def open(self, task: Task) -> None:
        self._stage.opened += 1
        await super().open(task)
        await self._stage.enter("open")

    async def reset(self) -> Start:
        given = await self._stage.enter("reset")
        return given if given is not None else await super().reset()

    async def step(self, action: Action) -> Step:
        given = await self._stage.enter("step")
        return given if given is not None else await super().step(action)

    async def verify(self) -> Verdict:
        given = await self._stage.enter("verify")
        return given if given is not None else await super().verify()

    async def close(self) -> None:
        self._stage.closed += 1
        await self._stage.enter("close")


class StuckOnce(ScriptedSampler):
    """Never answers its first request; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__(delay=self._delayed)
        self.asked = 0

    def _delayed(self, request: GenerationRequest) -> float:
        self.asked += 1
        return math.inf if self.asked == 1 else 0.0


@asynccontextmanager
async def fleet_on(
    stage: Stage, *, sampler: ScriptedSampler | None = None, limits: LimitSettings = LIMITS, **environment: int
) -> AsyncIterator[SmallFleet]:
    """One environment worker on this stage and one inference worker; checks at the end that everything rests."""
    configuration = configured(limits=limits, environment=EnvironmentSettings(**({"slots": 2} | environment)))
    with anyio.fail_after(600):
        async with small_fleet(configuration) as fleet:
            members = [fleet.environment("environment-0", make=stage), fleet.inference("inference-0", sampler=sampler)]
            await fleet.heard(*members)
            await anyio.wait_all_tasks_blocked()
            tasks = len(anyio.get_running_tasks())
            yield fleet
            await fleet.rests()
            ended = sum(member.ended.is_set() for member in members)
            assert len(anyio.get_running_tasks()) <= tasks or ended, "a task is left"
            assert stage.opened == stage.closed, "an environment is not closed, or closed twice"


async def played(stage: Stage, *, sampler: ScriptedSampler | None = None, deadline_seconds: float = 300.0) -> EpisodeFinished:
    async with fleet_on(stage, sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=deadline_seconds)
        return await fleet.result()


def assert_not_graded(result: EpisodeFinished, outcome: str, error_class: str) -> None:
    assert (result.outcome, result.error_class) == (outcome, error_class)
    assert result.reward is None


# A stage hangs


@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_a_stage_that_hangs_is_a_timeout_named_after_it(stage: str) -> None:
    result = await played(Stage(**{stage: hanging}))
    assert_not_graded(result, "timeout", f"{stage}_timeout")
    assert result.timings[stage] == pytest.approx(5)


async def test_an_action_that_never_comes_is_a_timeout() -> None:
    """The inference worker lives, holds the observation and never answers: nobody else is asked, the limit ends it."""
    stage, sampler = Stage(), StuckOnce()
    async with fleet_on(stage, sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=20)
        assert_not_graded(await fleet.result(), "timeout", "action_timeout")
        await anyio.sleep(20)  # what the sampler holds ends with the episode's deadline
    assert sampler.asked == 1


async def test_an_environment_that_nobody_calls_for_too_long_is_a_timeout_counted_from_the_end_of_its_last_call() -> None:
    """Its reset takes longer than it may be idle, and does not count."""
    limits = msgspec.structs.replace(LIMITS, idle=3, action=20)
    stage, sampler = Stage(reset=lasting(4)), StuckOnce()
    async with fleet_on(stage, sampler=sampler, limits=limits) as fleet:
        await fleet.request(deadline_seconds=60)
        result = await fleet.result()
        assert_not_graded(result, "timeout", "idle_timeout")
        assert result.timings["action"] == pytest.approx(3)
        await anyio.sleep(60)


async def test_a_verification_that_hangs_leaves_no_reward() -> None:
    result = await played(Stage(verify=hanging))
    assert_not_graded(result, "verifier_unknown", "no_verdict")
    assert "verify_timeout" in result.error


async def test_a_close_that_hangs_changes_no_outcome() -> None:
    result = await played(Stage(close=hanging))
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert result.timings["close"] == pytest.approx(5)


# A stage raises


@pytest.mark.parametrize(
    "error", [ValueError("no"), EnvironmentFailed("gone"), ExceptionGroup("two", [OSError("lost")])], ids=repr
)
@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_a_stage_that_raises_is_a_failure_of_the_environment(stage: str, error: Exception) -> None:
    result = await played(Stage(**{stage: raising(error)}))
    expected = "OSError" if isinstance(error, ExceptionGroup) else type(error).__name__
    assert_not_graded(result, "env_failed", expected)
    assert result.error.startswith(f"{stage}: ")


async def test_a_verification_that_raises_leaves_no_reward() -> None:
    assert_not_graded(await played(Stage(verify=raising(ValueError("no")))), "verifier_unknown", "no_verdict")


async def test_a_close_that_raises_changes_no_outcome() -> None:
    result = await played(Stage(close=raising(ValueError("no"))))
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_an_environment_that_cannot_even_be_made_is_a_failure_of_the_environment() -> None:
    def make() -> ScriptedEnvironment:
        raise ImportError("no such simulator")

    with anyio.fail_after(100):
        async with small_fleet() as fleet:
            fleet.environment("environment-0", make=make)
            await fleet.request()
            assert_not_graded(await fleet.result(), "env_failed", "ImportError")
            await fleet.rests()


async def test_an_error_text_that_has_no_bytes_is_recorded_all_the_same() -> None:
    result = await played(Stage(step=raising(OSError("no file \udcff"))))
    assert_not_graded(result, "env_failed", "OSError")
    assert "no file ?" in result.error


# A stage gives nonsense


@pytest.mark.parametrize(
    "verdict", [Verdict(reward=None, reason="?"), Verdict(reward=math.nan), Verdict(reward=-math.inf)], ids=repr
)
async def test_a_verdict_that_is_no_number_leaves_no_reward(verdict: Verdict) -> None:
    assert_not_graded(await played(Stage(verify=giving(verdict))), "verifier_unknown", "no_verdict")


@pytest.mark.parametrize("verdict", [1.0, "1.0", Verdict(reward="1.0")], ids=repr)  # type: ignore[arg-type]
async def test_a_verdict_of_the_wrong_type_leaves_no_reward(verdict: object) -> None:
    assert_not_graded(await played(Stage(verify=giving(verdict))), "verifier_unknown", "no_verdict")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_turn_reward_that_is_not_finite_voids_the_episode(reward: float) -> None:
    assert_not_graded(await played(Stage(step=giving(Step(reward=reward)))), "verifier_unknown", "reward_not_finite")


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
    result = await played(Stage(**{stage: giving(value)}))
    assert result.outcome == "env_failed"
    assert result.reward is None


async def test_an_observation_of_ten_megabytes_is_cut_and_the_episode_goes_on() -> None:
    stage = Stage()
    content = "ß" * 5_000_000

    async def once() -> Step | None:
        await anyio.lowlevel.checkpoint()
        return Step(messages=(ChatMessage(role="user", content=content),)) if stage.entered.count("step") == 1 else None

    stage.trouble["step"] = once
    async with fleet_on(stage, observation_bytes=1024) as fleet:
        await fleet.request()
        assert (await fleet.result()).outcome == "truncated"  # by the tokens of a 1024-token model, not by a failure
        seen = [observation.messages[0].content for observation in await fleet.observations()]
    assert seen[1] == "ß" * 512 + f"\n[cut: {10_000_000 - 1024} more bytes]"


@pytest.mark.parametrize(
    "messages",
    [
        (ChatMessage(role="user", content="x" * 30_000),) * 100,
        (ChatMessage(role="user", content=(Text(text="x" * 10_000_000),)),),
        (ChatMessage(role="user", content="\ud800"),),
    ],
    ids=["many messages", "one part", "no bytes"],
)
async def test_an_observation_that_cannot_travel_ends_its_episode_alone(messages: tuple[ChatMessage, ...]) -> None:
    result = await played(Stage(step=giving(Step(messages=messages))))
    assert_not_graded(result, "env_failed", "MalformedMessage")


async def test_a_prompt_longer_than_the_model_is_an_outcome_without_tokens() -> None:
    start = Start(messages=(ChatMessage(role="user", content="x" * 5000),))
    result = await played(Stage(reset=giving(start)))
    assert (result.outcome, result.error_class) == ("truncated", "tokens")
    assert (result.turns, result.actions, result.tokens) == (0, (), 0)


# The deadline


@pytest.mark.parametrize("stage", BEFORE_THE_VERDICT)
async def test_the_episodes_deadline_ends_whatever_stage_it_is_in(stage: str) -> None:
    result = await played(Stage(**{stage: hanging}), deadline_seconds=3)
    assert_not_graded(result, "timeout", "episode_timeout")


async def test_the_episodes_deadline_ends_the_wait_for_an_action() -> None:
    async with fleet_on(Stage(), sampler=StuckOnce()) as fleet:
        started = anyio.current_time()
        await fleet.request(deadline_seconds=3)
        assert_not_graded(await fleet.result(), "timeout", "episode_timeout")
        assert anyio.current_time() - started == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("stage", ["verify", "close"])
async def test_what_was_played_in_time_is_still_graded_and_closed_after_the_deadline(stage: str) -> None:
    result = await played(Stage(**{stage: lasting(4)}), deadline_seconds=3)
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_a_request_that_waited_past_its_deadline_is_not_begun() -> None:
    stage = Stage()
    with anyio.fail_after(100):
        async with small_fleet() as fleet:
            await fleet.request(deadline_seconds=3)
            await anyio.sleep(4)
            fleet.environment("environment-0", make=stage)
            result = await fleet.result()
            assert_not_graded(result, "timeout", "episode_timeout")
            assert (result.attempts, stage.entered) == (0, [])
            await fleet.rests()


# Cancellation


@pytest.mark.parametrize("stage", [*BEFORE_THE_VERDICT, "verify", "close"])
async def test_an_episode_cancelled_in_any_stage_ends_as_cancelled(stage: str) -> None:
    at = Stage(**{stage: lasting(4)})
    async with fleet_on(at) as fleet:
        await fleet.request()
        await at.begun.wait()
        answer = await fleet.control(fleet.members["environment-0"], "cancel", "e", "another")
        assert (answer.done, answer.detail) == (True, "e")
        assert_not_graded(await fleet.result(), "cancelled", "cancelled")


async def test_an_episode_cancelled_while_it_waits_for_an_action_ends_as_cancelled() -> None:
    sampler = StuckOnce()
    async with fleet_on(Stage(), sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=20)
        await anyio.sleep(2)
        await fleet.control(fleet.members["environment-0"], "cancel", "e")
        assert_not_graded(await fleet.result(), "cancelled", "cancelled")
        await anyio.sleep(20)


async def test_an_order_to_cancel_is_kept_while_the_log_is_away() -> None:
    """Longer than a question to it is waited for; the episode is not played again when the log is back."""
    at = Stage(step=lasting(4))
    async with fleet_on(at) as fleet:
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


async def test_cancelling_an_episode_that_does_not_run_here_says_so() -> None:
    async with fleet_on(Stage()) as fleet:
        await fleet.request()
        await fleet.result()
        answer = await fleet.control(fleet.members["environment-0"], "cancel", "e")
        assert (answer.done, answer.detail) == (False, "")


# Draining


@pytest.mark.parametrize("stage", [*BEFORE_THE_VERDICT, "verify", "close"])
async def test_a_draining_worker_finishes_what_ends_in_time(stage: str) -> None:
    at = Stage(**{stage: lasting(2)})
    async with fleet_on(at) as fleet:
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
    at = Stage(**{stage: hanging})
    limits = LimitSettings(open=30, reset=30, step=30, action=30, verify=8, close=8, drain=3)
    async with fleet_on(at, limits=limits) as fleet:
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
        assert (await fleet.standing()).losses == 1, "a hand-back counts as no loss"
        assert fleet.finished_at["e"] == pytest.approx(anyio.current_time(), abs=0.5), "it was not played at once"


async def test_a_worker_drained_while_it_waits_for_an_action_hands_back_and_the_turn_is_asked_again() -> None:
    sampler = StuckOnce()
    limits = LimitSettings(action=60, drain=3)
    async with fleet_on(Stage(), sampler=sampler, limits=limits) as fleet:
        await fleet.request(deadline_seconds=40)
        await anyio.sleep(1)
        await fleet.heard(fleet.environment("environment-1"))
        await fleet.drained([fleet.members["environment-0"]])
        result = await fleet.result()
        assert (result.outcome, result.worker) == ("completed", "environment-1")
        await anyio.sleep(40)
