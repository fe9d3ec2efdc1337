"""An environment that fails is named in its results: where in its own code, and once per kind with the traceback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import Action, ChatMessage, EpisodeFinished, Task, ToolSpec
from fleetbus_workers.environment.adapters.python_class.environment import build_class_factory
from fleetbus_workers.environment.adapters.python_class.process_pool import ProcessPool
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.failure_location import format_traceback, locate_error
from fleetbus_workers.environment.validation import InvalidReturn, validate_return
from tests.support.small_deployment import build_configuration, small_deployment

KEY = "sk-" + "a1B2" * 8
SOURCE = """
from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.base import Start, Step, Verdict


class Faulty:
    replayable = True

    @ASYNC@def open(self, task):
        self.task = task

    @ASYNC@def reset(self):
        return Start(messages=(ChatMessage(role="user", content="play"),))

    @ASYNC@def step(self, action):
        @STEP@

    @ASYNC@def state(self):
        return {}

    @ASYNC@def verify(self):
        @VERIFY@

    @ASYNC@def close(self):
        pass
"""
STEP_LINE, VERIFY_LINE = 15, 21
"""Where the two methods begin."""

Make = Callable[..., Any]


@pytest.fixture
def write_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(
        step: str = "return Step(terminated=True)", verify: str = "return Verdict(reward=1.0)", kind: str = "async "
    ) -> Any:
        source = SOURCE.replace("@ASYNC@", kind).replace("@STEP@", step).replace("@VERIFY@", verify)
        (tmp_path / "faulty_environment.py").write_text(source)
        sys.modules.pop("faulty_environment", None)
        importlib.invalidate_caches()
        return importlib.import_module("faulty_environment").Faulty

    return write


async def play(kind: Any, episodes: int = 1, **settings: Any) -> list[EpisodeFinished]:
    make = build_class_factory(kind)
    with anyio.fail_after(50):
        async with make.run(), small_deployment(build_configuration(**settings)) as fleet:
            fleet.environment("environment-0", make=make)
            fleet.inference("inference-0")
            for number in range(episodes):
                await fleet.request(f"e{number}")
            return list(await fleet.all_results(episodes))


@pytest.mark.parametrize("kind", ["async ", ""], ids=["asynchronous", "blocking"])
@pytest.mark.parametrize(
    ("wrong", "error", "location"),
    [
        ({"step": "raise ValueError('boom')"}, "step: boom", f"faulty_environment.py:{STEP_LINE + 1} in Faulty.step"),
        (
            {"step": "return None"},
            "step returned None; it must return Step",
            f"faulty_environment.py:{STEP_LINE} in Faulty.step",
        ),
        (
            {"step": "return Step(reward=float('nan'))"},
            "turn 0 was rewarded nan",
            f"faulty_environment.py:{STEP_LINE} in Faulty.step",
        ),
        (
            {"step": "return Step(messages=(ChatMessage(role='usr', content='hm'),))"},
            "Step.messages[0].role is 'usr'; it must be one of system, user, assistant, tool",
            f"faulty_environment.py:{STEP_LINE} in Faulty.step",
        ),
        ({"verify": "return 1.0"}, "verify returned float 1.0", f"faulty_environment.py:{VERIFY_LINE} in Faulty.verify"),
        (
            {"verify": "return Verdict(reward=float('nan'))"},
            "the reward is nan, which is no grade",
            f"faulty_environment.py:{VERIFY_LINE} in Faulty.verify",
        ),
    ],
    ids=["raises", "None", "NaN", "role", "verdict of another type", "verdict NaN"],
)
async def test_a_mistake_in_an_environment_is_named_with_file_and_line(
    write_class: Make, wrong: dict[str, str], error: str, location: str, kind: str
) -> None:
    (result,) = await play(write_class(**wrong, kind=kind))
    assert result.reward is None
    assert error in result.error
    assert result.error_location == location


async def test_only_the_first_failure_of_a_kind_carries_its_traceback_and_no_secret(write_class: Make) -> None:
    results = await play(write_class(f"raise RuntimeError('no access with {KEY}')"), episodes=6)
    told = [result.traceback for result in results if result.traceback]
    assert len(told) == 1
    assert told[0].startswith("Traceback (most recent call last):\n")
    assert f'faulty_environment.py", line {STEP_LINE + 1}, in step' in told[0]
    assert "fleetbus_workers" not in told[0], "frames of the worker say nothing to the author of an environment"
    assert KEY not in told[0]
    assert {result.error_location for result in results} == {f"faulty_environment.py:{STEP_LINE + 1} in Faulty.step"}


async def test_a_traceback_is_bounded_and_keeps_both_ends(write_class: Make) -> None:
    (result,) = await play(write_class("raise RuntimeError('x' * 100_000 + 'the end')"))
    assert len(result.traceback) < 5000
    assert result.traceback.startswith("Traceback")
    assert result.traceback.endswith("the end")


async def test_a_step_that_hangs_is_named_with_the_line_where_it_waits(write_class: Make) -> None:
    (result,) = await play(write_class("import anyio; await anyio.sleep(100)"), limits=LimitSettings(step=0.5))
    assert (result.outcome, result.error_class) == ("timeout", "step_timeout")
    assert result.error_location == f"faulty_environment.py:{STEP_LINE + 1} in Faulty.step"


async def test_a_failure_in_a_process_of_a_pool_is_named_too(write_class: Make) -> None:
    write_class("return None")
    pool = ProcessPool("faulty_environment:Faulty", processes=1)
    with anyio.fail_after(100):
        async with pool.run():
            environment = pool()
            await environment.open(Task(key="t"))
            await environment.reset()
            with pytest.raises(EnvironmentFailed, match="step returned None") as failed:
                await environment.step(Action(episode_id="e", attempt=1, turn=0, text=""))
            await environment.close()
    assert locate_error(failed.value) == f"faulty_environment.py:{STEP_LINE} in Faulty.step"
    assert "InvalidReturn" in format_traceback(failed.value)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Start, None, "returned None; it must return Start"),
        (Start, Start(messages=("hi",)), r"Start.messages\[0\] must be a ChatMessage"),  # type: ignore[arg-type]
        (Start, Start(messages=(), tools=({"name": "x"},)), r"Start.tools\[0\] must be a ToolSpec"),  # type: ignore[arg-type]
        (Start, Start(messages=(), tools=(ToolSpec(name=3),)), r"Start.tools\[0\]: Expected `str`"),  # type: ignore[arg-type]
        (Start, Start(messages=(), info=3), "Start.info must be a dict"),  # type: ignore[arg-type]
        (Step, Step(messages=(ChatMessage(role="user", content=(3,)),)), r"Step.messages\[0\]: Expected"),  # type: ignore[arg-type]
        (Step, Step(terminated="no"), "Step.terminated must be true or false"),  # type: ignore[arg-type]
        (Step, Step(reward=None), "Step.reward must be a number, not None"),  # type: ignore[arg-type]
        (Step, Step(tool_calls=1.5), "Step.tool_calls must be a whole number"),  # type: ignore[arg-type]
        (Verdict, Verdict(reward="1"), "Verdict.reward must be a number, not str '1'"),  # type: ignore[arg-type]
        (Verdict, Verdict(reward=1.0, reason=None), "Verdict.reason must be text"),  # type: ignore[arg-type]
    ],
)
def test_every_field_of_a_return_value_is_checked(kind: type, value: object, words: str) -> None:
    with pytest.raises(InvalidReturn, match=words):
        validate_return(kind, value, "step")
