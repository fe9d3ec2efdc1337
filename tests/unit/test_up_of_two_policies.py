"""The lines of `up` and of the views for a run in which two policies are trained by learners of their own."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest
from matplotlib.axes import Axes

from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, LearnerSettings, LimitSettings, RunSettings
from fleetbus_schemas import LineageStarted, Message, StepTrained, Subjects, TrainingFinished, encode
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.up.command import load_finished_summary
from fleetbus_workers.up.display import PlainDisplay
from fleetbus_workers.up.log_follower import Follower
from fleetbus_workers.up.progress_guard import ProgressGuard
from fleetbus_workers.up.restarts import Achievements
from fleetbus_workers.up.reward_chart import draw_reward_chart
from fleetbus_workers.up.summary_builder import Summary, build_summary, is_summarized
from fleetbus_workers.up.summary_report import format_report, write_summary

SUBJECTS = Subjects("r")
STARTED = LineageStarted(lineage="l1", worker="learner")
ENDED = TrainingFinished(lineage="l1", step=2, version=2)


def step(number: int, **metrics: float) -> StepTrained:
    return StepTrained(lineage="l1", step=number, version=number, episodes=(f"e{number}",), metrics=metrics)


MAIN = [STARTED, step(1, reward=0.5, reward_of_proposer=0.1), step(2, reward=0.5, reward_of_proposer=0.2), ENDED]
SOLVER = [STARTED, step(1, reward=0.5, success=0.5, reward_of_solver=0.3), step(2, reward=0.5, reward_of_solver=0.9), ENDED]


class Watched:
    """A run of two policies as `up` follows it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress = Progress(2, is_summarized)
        self.progress.others = {"solver": Progress(2, is_summarized)}
        self.guard = ProgressGuard(LimitSettings(no_progress=60.0), 0.0, learners=2)
        self.achievements = Achievements()

    async def follow(self, bus: MemoryBus) -> None:
        display = PlainDisplay(self.progress, self.lines.append)
        follower = Follower(bus, SUBJECTS, "default", self.progress, display, self.guard, self.achievements)
        await follower.finish()

    @property
    def summary(self) -> Summary:
        return build_summary(self.progress, run="r", seed=1, wall_seconds=1.0)


async def publish(bus: MemoryBus, policy: str, messages: list[Message]) -> None:
    for message in messages:
        await bus.publish(SUBJECTS.train(policy), encode(message))


async def watch(main: list[Message], solver: list[Message]) -> Watched:
    watched = Watched()
    with anyio.fail_after(30):
        async with MemoryServer().connect("r") as bus:
            await bus.declare(plan_run("r", policies=("default", "solver"), lanes=1))
            await publish(bus, "default", main)
            await publish(bus, "solver", solver)
            await watched.follow(bus)
    return watched


async def test_each_policy_has_its_own_steps_lines_and_rewards() -> None:
    watched = await watch(MAIN, SOLVER)
    assert [line.partition(" · ")[0] for line in watched.lines] == [
        "step 1/2",
        "step 2/2",
        "solver: step 1/2",
        "solver: step 2/2",
    ]
    assert "reward 0.90" in watched.lines[-1] and "success" not in watched.lines[-2]
    summary = watched.summary
    assert (summary.steps, summary.reward_by_step, summary.episodes_trained) == ([1, 2], [0.5, 0.5], 2)
    solver = summary.policies["solver"]
    assert (solver.steps, solver.reward_by_step, solver.finished) == ([1, 2], [0.3, 0.9], True)
    assert (watched.achievements.count("learner"), watched.achievements.count("learner-solver")) == (2, 2)


async def test_a_run_is_finished_once_all_of_its_learners_are(tmp_path: Path) -> None:
    half = await watch(MAIN, SOLVER[:2])
    assert not half.summary.finished and half.guard.find_stall(1e6) is not None
    whole = await watch(MAIN, SOLVER)
    assert whole.summary.finished and whole.guard.find_stall(1e6) is None
    run = RunSettings(name="r", folder=str(tmp_path), seats="solver=train")
    configuration, folder = Configuration(run=run, learner=LearnerSettings(steps=2)), run_folder(run)
    write_summary(half.summary, folder.summary)
    assert load_finished_summary(configuration, folder) is None
    write_summary(whole.summary, folder.summary)
    assert load_finished_summary(configuration, folder) == whole.summary
    write_summary(msgspec.structs.replace(whole.summary, run="origin"), folder.summary)
    assert load_finished_summary(configuration, folder) is None, "of the run that the folder is a copy of"
    write_summary(whole.summary, folder.summary)
    run = RunSettings(name="r", folder=str(tmp_path), seats="solver=train\njudge=train")
    assert load_finished_summary(Configuration(run=run, learner=LearnerSettings(steps=2)), folder) is None


async def test_the_report_names_the_second_policy_its_reward_and_its_model(tmp_path: Path) -> None:
    folder = run_folder(RunSettings(name="r", folder=str(tmp_path)))
    (folder.path / "policies/solver/model").mkdir(parents=True)
    lines = format_report((await watch(MAIN, SOLVER)).summary, folder, str)
    assert "solver: 2 steps, 2 episodes trained, reward 0.300 → 0.900" in lines
    assert f"  solver   {folder.path}/policies/solver/model" in lines
    stopped = format_report((await watch(MAIN, SOLVER[:2])).summary, folder, str)
    assert "solver: not finished, 1 steps, 1 episodes trained, reward 0.300 → 0.300" in stopped


async def test_the_picture_has_the_reward_of_each_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    plot = Axes.plot

    def note(axes: Axes, x: list[float], y: list[float], *rest: object, label: str, **style: object) -> object:
        drawn[label] = list(x), list(y)
        return plot(axes, x, y, *rest, label=label, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "plot", note)
    draw_reward_chart((await watch(MAIN, SOLVER)).summary, tmp_path / "reward.png")
    assert drawn["training batch"] == ([1, 2], [0.5, 0.5])
    assert drawn["solver, mean of 5 steps"] == ([1, 2], [pytest.approx(0.6)] * 2)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


async def test_a_view_of_a_run_shows_the_training_of_its_own_policy() -> None:
    state = RunState(2, joined=["solver"])
    with anyio.fail_after(30):
        async with MemoryServer().connect("r") as bus, anyio.create_task_group() as tasks:
            await bus.declare(plan_run("r", policies=("default", "solver"), lanes=1))
            await publish(bus, "default", MAIN)
            await publish(bus, "solver", SOLVER)
            observer = RunObserver(bus, SUBJECTS, state)
            tasks.start_soon(observer.run)
            while not state.training.is_finished:  # noqa: ASYNC110  # it says nothing when it has read all
                await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
    assert [point.metrics["reward_of_proposer"] for point in state.training.steps] == [0.1, 0.2]
