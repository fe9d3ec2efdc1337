"""`fleetbus.train` and `fleetbus.Run` with a real server and scripted role processes; the environment worker is real."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import fleetbus
from fleetbus_workers.api import run_thread
from fleetbus_workers.up.run import Run as UpRun
from tests.support.backends import asyncio_and_trio
from tests.system.scripted_roles import scripted_command

pytestmark = [pytest.mark.timeout(200), pytest.mark.integration]

TASKS = [{"key": f"t{number}", "prompt": "Say something.", "seed": number} for number in range(4)]


class Echo:
    """An environment with ordinary calls, defined in the caller's own file."""

    replayable = True

    def open(self, task: fleetbus.Task) -> None:
        self.task = task

    def reset(self) -> fleetbus.Start:
        return fleetbus.Start(messages=(fleetbus.ChatMessage(role="user", content=self.task.prompt),))

    def step(self, action: fleetbus.Action) -> fleetbus.Step:
        return fleetbus.Step(terminated=True)

    def state(self) -> dict[str, Any]:
        return {}

    def verify(self) -> fleetbus.Verdict:
        return fleetbus.Verdict(reward=1.0)

    def close(self) -> None:
        """Nothing to release."""


class Needy(Echo):
    def __init__(self, number: int) -> None:
        self.number = number


anyio_backend = asyncio_and_trio


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_thread, "build_role_command", scripted_command)
    for name in [name for name in os.environ if name.startswith("FLEETBUS_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Any:
    before = set(psutil.Process().children(recursive=True))
    threads = set(threading.enumerate())
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=10)[1] == []
    assert [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("fleetbus run")] == []


def test_train_returns_the_summary_and_events_come_in_the_calling_thread() -> None:
    events: list[tuple[fleetbus.Event, int]] = []
    summary = fleetbus.train(
        Echo, TASKS, steps=2, name="mine", on_event=lambda event: events.append((event, threading.get_ident()))
    )
    assert (summary.run, summary.finished, summary.optimizer_steps, summary.reward_by_step) == ("mine", True, 2, [0.5, 1.0])
    assert {thread for _, thread in events} == {threading.get_ident()}
    steps = [event for event, _ in events if event.kind == "step"]
    assert [(event.step, event.steps, event.metrics["reward"]) for event in steps] == [(1, 2, 0.5), (2, 2, 1.0)]
    assert [event.name for event, _ in events if event.kind == "evaluation"] == ["start", "end", "end_greedy"]
    assert "learner" in {event.name for event, _ in events if event.kind == "worker_started"}
    assert "trains the starter policy on python-object:" in events[0][0].text


def test_the_same_call_again_returns_at_once_and_more_steps_resume_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fleetbus.train(Echo, TASKS, steps=1, on_event=None)
    with monkeypatch.context() as patched:
        patched.setattr(UpRun, "run", None)
        assert fleetbus.train(Echo, TASKS, steps=1, on_event=None) == first
    with pytest.raises(fleetbus.UserError, match="this run was started with environment python-object:"):
        fleetbus.train("warehouse", TASKS, on_event=None)
    with pytest.raises(fleetbus.UserError, match="this run was started with tasks"):
        fleetbus.train(Echo, TASKS[:2], on_event=None)
    texts: list[str] = []
    fleetbus.train(Echo, TASKS, steps=2, on_event=lambda event: texts.append(event.text))
    assert texts[0].startswith("run default resumes")


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def refused(*arguments: Any, **settings: Any) -> str:
        with pytest.raises(fleetbus.UserError) as error:
            fleetbus.train(*arguments, on_event=None, **settings)
        return str(error.value)

    assert refused(learner_group=3) == "unknown argument learner_group; did you mean learner_groups?"
    assert refused(groups=3) == "unknown argument groups; did you mean learner_groups?"
    assert refused(learner_groups=0) == "learner_groups = 0 is not allowed: it takes a whole number, at least 1"
    assert refused(steps="many").startswith("steps = many is not allowed")
    assert refused(steps=3, learner_steps=4) == "steps and learner_steps are the same setting: give one of them"
    assert "lacks open, reset" in refused(dict)
    assert "needs arguments (missing a required argument: 'number')" in refused(Needy)
    assert "cannot be called" in refused(Echo())
    assert "cannot be created: ZeroDivisionError" in refused(lambda: 1 / 0)
    assert refused(Echo, []) == "the argument tasks: contains no tasks; add at least one"
    assert refused(Echo, fleetbus.Task(key="a")) == "the argument tasks: must be a list of tasks, not Task"
    assert refused(Echo, {"key": "a", "prompt": "b"}) == "the argument tasks: must be a list of tasks, not dict"
    assert refused(Echo, 3) == "the argument tasks: must be a list of tasks, not int"
    assert refused(Echo, [{"key": "a"}]).startswith("the argument tasks: task 1 (a) has no prompt")
    assert refused(Echo, TASKS, model="nowhere").startswith("no model folder")
    assert list(tmp_path.iterdir()) == []


def test_a_callable_that_makes_environments_will_do() -> None:
    texts: list[str] = []
    fleetbus.train(functools.partial(Needy, 3), steps=1, on_event=lambda event: texts.append(event.text))
    assert "test_api_run.Needy" in texts[0] and "environment is ready" in texts


def test_an_error_of_the_caller_s_callback_stops_everything_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCRIPT", "wait")

    def fail(event: fleetbus.Event) -> None:
        if event.name == "environment":
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fleetbus.train(Echo, TASKS, on_event=fail)
    assert (tmp_path / ".fleetbus" / "runs" / "default" / "summary.json").is_file()


def test_a_worker_that_cannot_work_fails_the_run_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "crash")
    with pytest.raises(fleetbus.RunFailed, match="learner ended with status 3") as error:
        fleetbus.train(Echo, TASKS, on_event=None)
    assert any("the last words of learner" in line for line in error.value.log_lines)


async def test_a_run_gives_events_its_summary_and_its_episodes() -> None:
    async with fleetbus.Run(Echo, TASKS, steps=2, name="two") as run:
        assert run.summary is None
        kinds = [event.kind async for event in run.events()]
        summary = await run.finished()
        rows = await run.episodes()
    assert kinds.count("step") == 2 and kinds.count("evaluation") == 3
    assert summary == run.summary and summary.finished
    assert [row.outcome for row in rows] == ["completed"] * 8
    for source in ("two", Path(".fleetbus/runs/two")):  # its server is stopped
        assert list(fleetbus.open_run(source).episodes()) == rows
        assert [step.metrics["reward"] for step in fleetbus.open_run(source).metrics()] == [0.5, 1.0]


async def test_leaving_the_block_or_a_cancelled_scope_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "wait")
    with anyio.CancelScope() as scope:
        async with fleetbus.Run(Echo, TASKS) as run:
            async for event in run.events():
                if event.name == "environment":
                    scope.cancel()
    assert scope.cancelled_caught
    assert run.summary is not None and not run.summary.finished


async def test_stop_ends_it_in_order_and_what_waits_for_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "wait")
    summaries: list[fleetbus.Summary] = []
    async with fleetbus.Run(Echo, TASKS) as run, anyio.create_task_group() as group:

        async def wait() -> None:
            summaries.append(await run.finished())

        group.start_soon(wait)
        async for event in run.events():
            if event.name == "environment":
                break
        summaries.append(await run.stop())
    assert [summary.finished for summary in summaries] == [False, False]


async def test_a_second_run_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "wait")
    async with fleetbus.Run(Echo, TASKS):
        with pytest.raises(fleetbus.UserError, match="run default is already being trained"):
            async with fleetbus.Run(Echo, TASKS):
                pass


async def test_bad_input_is_raised_where_the_run_is_entered() -> None:
    with pytest.raises(fleetbus.UserError, match="unknown argument nonsense"):
        async with fleetbus.Run(nonsense=1):
            pass


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.system import test_api_run
from fleetbus_workers.api import run_thread
run_thread.build_role_command = test_api_run.scripted_command
import fleetbus

class Own(test_api_run.Echo):
    pass

def show(event):
    print(event.text, flush=True)

{body}
"""

BODIES = {
    "interrupted": "fleetbus.train(Own, test_api_run.TASKS, on_event=show)",
    "abandoned": """
import asyncio
async def main():
    run = fleetbus.Run(Own, test_api_run.TASKS)
    await run.__aenter__()
    async for event in run.events():
        show(event)
        if event.text == "environment is ready":
            return
asyncio.run(main())
""",
    "asynchronous": """
import asyncio
async def main():
    async with fleetbus.Run(Own, test_api_run.TASKS) as run:
        async for event in run.events():
            show(event)
asyncio.run(main())
""",
}


@pytest.mark.parametrize(
    ("body", "interrupts"), [("interrupted", 1), ("interrupted", 2), ("asynchronous", 1), ("abandoned", 0)]
)
def test_a_script_that_is_interrupted_or_ends_leaves_no_process(tmp_path: Path, body: str, interrupts: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), body=BODIES[body]))
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
            env={**os.environ, "SCRIPT": "wait"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by what runs in the background
        )
    output = tmp_path / "out"
    try:
        until(
            lambda: (
                ("environment is ready" in output.read_text() and "inference is ready" in output.read_text())
                or (body == "abandoned" and process.poll() is not None)
            )
        )
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            if interrupts > 1:
                until(lambda: "stopping" in output.read_text() or process.poll() is not None)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    text = output.read_text()
    assert ("KeyboardInterrupt" in text) == (interrupts > 0)
    assert (process.returncode == 0) == (interrupts == 0), text


def until(condition: Callable[[], object], within: float = 100.0) -> None:
    """Wait for something that happens in other processes: only polling can."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
