"""A policy that collapses is named wherever one looks, by what a real learner wrote into the log; a healthy one is not."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from rich.console import Console

from fleetbus.config.settings import (
    AlgorithmSettings,
    Configuration,
    EnvironmentSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    RunSettings,
)
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import Stall, find_notes, find_stalls
from fleetbus_workers.observe.top.view import build_facts, screen
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

pytestmark = pytest.mark.integration

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 1}) for index in range(20)]
GROUPS, SIZE = 8, 4
GOOD_STEPS = 12

anyio_backend = virtual_time


class Policy:
    """How often it succeeds depends on how often it was trained, as ``skill`` says."""

    def __init__(self, skill: Callable[[int], float]) -> None:
        self.trainer = ScriptedTrainer()
        self._skill = skill
        self._chance = random.Random(1)

    def plays(self) -> Verdict:
        return Verdict(reward=float(self._chance.random() < self._skill(self.trainer.updates)))


class Playing(ScriptedEnvironment):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return self._policy.plays()


class Onlooker:
    """Looks every second, as `top`, the page and `metrics` do; ``seen`` has what the first look at each reason showed."""

    def __init__(self, fleet: SmallDeployment) -> None:
        self.state = RunState(steps=0)
        self._watch = RunObserver(fleet.bus, fleet.subjects, self.state)
        self._bus = fleet.bus
        self.seen: dict[str, tuple[int, Stall]] = {}
        self.noted: dict[int, str] = {}

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch.run)
            while True:
                await anyio.sleep(1)
                for stall in self.stalls():
                    self.seen.setdefault(stall.where, (self.state.progress.step, stall))
                for note in find_notes(self.state, now_ns=self._bus.now_ns()):
                    self.noted.setdefault(self.state.progress.step, note)

    def stalls(self) -> list[Stall]:
        return find_stalls(self.state, self._watch.health, now=anyio.current_time(), now_ns=self._bus.now_ns())

    def screen(self) -> str:
        now, now_ns = anyio.current_time(), self._bus.now_ns()
        console = Console(width=80, file=io.StringIO())
        shown = build_facts(
            RunView(self.state, self._watch.health, ServerView(), self.stalls(), now=now, now_ns=now_ns), run=RUN
        )
        console.print(screen(shown))
        return " ".join(str(console.file.getvalue()).split())  # type: ignore[attr-defined]

    def stalled(self) -> list[tuple[str, ...]]:
        """The labels of `fleetbus_stalled`."""
        now, now_ns = anyio.current_time(), self._bus.now_ns()
        samples = collect(RunView(self.state, self._watch.health, ServerView(), self.stalls(), now=now, now_ns=now_ns))
        return [sample.labels for sample in samples if sample.name == "fleetbus_stalled"]


def settings(folder: Path, **tables: Any) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        limits=LimitSettings(),
        environment=EnvironmentSettings(slots=GROUPS * SIZE),
        inference=InferenceSettings(slots=GROUPS * SIZE),
        learner=LearnerSettings(steps=10_000, groups=GROUPS, group_size=SIZE, checkpoint_every=1000, max_staleness=0),
        evaluation=EvaluationSettings(episodes=0),
        **tables,
    )


@asynccontextmanager
async def training(configuration: Configuration, policy: Policy) -> AsyncIterator[Onlooker]:
    """A step every ten seconds or so."""
    with anyio.fail_after(5000):
        async with small_deployment(configuration, published=False) as fleet, anyio.create_task_group() as tasks:
            look = Onlooker(fleet)
            tasks.start_soon(look.run)
            fleet.environment("environment-0", make=lambda: Playing(policy))
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 10.0))
            fleet.learner("learner-0", trainer=policy.trainer, curriculum=Curriculum(TASKS, [], seed=1))
            yield look
            tasks.cancel_scope.cancel()


async def until_step(look: Onlooker, step: int) -> None:
    while look.state.progress.step < step:  # noqa: ASYNC110  # virtual time costs nothing
        await anyio.sleep(1)


async def test_a_policy_that_collapses_is_named_on_the_screen_in_the_metrics_and_in_the_learners_log(tmp_path: Path) -> None:
    policy = Policy(lambda updates: 0.8 if updates < GOOD_STEPS else 0.0)
    with structlog.testing.capture_logs() as logs:
        async with training(settings(tmp_path), policy) as look:
            await until_step(look, GOOD_STEPS)
            assert look.seen == {} and "stuck" not in look.screen()
            await until_step(look, GOOD_STEPS + 10)
            step, stall = look.seen["policy"]
            assert GOOD_STEPS + 6 <= step <= GOOD_STEPS + 9, "a few batches, and a minute"
            assert "success fell from 0.8" in stall.reason and f"to 0.00 within 1 step of step {GOOD_STEPS}" in stall.reason
            (stall,) = look.stalls()
            since = GOOD_STEPS + 1
            assert f"no signal since step {since}: the last {10 * GROUPS} groups had equal rewards each" in stall.reason
            assert "stuck at the policy for" in look.screen() and "learner.max_grad_norm" in look.screen()
            assert look.stalled() == [("policy",)]
            assert look.noted == {} and set(look.seen) == {"policy"}
    warned = [each["event"] for each in logs if each["log_level"] == "warning" and "success" in each["event"]]
    assert any("no signal since step" in event for event in warned) and len(warned) <= 2, "said once each"


async def test_a_policy_that_solves_its_tasks_is_in_no_trouble_at_any_time(tmp_path: Path) -> None:
    policy = Policy(lambda updates: min(0.05 + 0.1 * updates, 1.0))
    async with training(settings(tmp_path), policy) as look:
        await until_step(look, 24)
        assert look.seen == {} and look.stalled() == []
        assert look.noted and min(look.noted) >= 10 + 8, "not before all of the last 64 groups succeeded"
        assert "no more to learn since step" in look.screen() and "stuck" not in look.screen()


async def test_a_collapse_is_named_where_groups_without_a_signal_are_replaced(tmp_path: Path) -> None:
    policy = Policy(lambda updates: 0.5 if updates < 4 else 0.0)
    algorithm = AlgorithmSettings(dynamic_sampling=True, dynamic_sampling_batches=1)
    async with training(settings(tmp_path, algorithm=algorithm), policy) as look:
        await until_step(look, 4 + 9)
        (stall,) = look.stalls()
        assert stall.where == "policy" and "episodes more were replaced for it" in stall.reason
        assert stall.reason.count("no signal since step 5") == 1
