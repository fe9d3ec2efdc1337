"""Environments of another package in its own interpreter, with a stand-in for the package: rewards, errors, ends."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.foreign import host as foreign_host
from fleetbus_workers.environment.base import EnvironmentFailed, Step
from fleetbus_workers.environment.keyed_specs import parse_keyed_specs
from fleetbus_workers.environment.specs import build_environment_factory, find_adapter
from fleetbus_workers.up.checks import check_environment
from tests.support.processes import children

GUESS = Path(__file__).parent / "stand_in" / "guess"
SPEC = f"verifiers+python={sys.executable}:{GUESS}"
SETTINGS = Configuration(environment=EnvironmentSettings(agent_isolation="off"), limits=LimitSettings(verify=10))


def act(text: str) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text)


def build(spec: str = SPEC, settings: Configuration = SETTINGS) -> Any:
    return build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]


@asynccontextmanager
async def episode(factory: Any, index: int = 0) -> AsyncIterator[tuple[Any, str]]:
    environment = factory()
    try:
        await environment.open(Task(key="t", prompt="", config={"index": index}))
        start = await environment.reset()
        yield environment, start.messages[-1].content
    finally:
        await environment.close()


async def say(environment: Any, *texts: str) -> Step:
    for text in texts:
        step: Step = await environment.step(act(text))
    return step


async def test_the_reward_is_the_packages_own() -> None:
    factory = build()
    async with factory.run():
        async with episode(factory) as (environment, asked):
            assert asked == "Say alpha."
            assert [message.content for message in (await say(environment, "alpha")).messages] == ["Again."]
            assert (await say(environment, "beta")).terminated
            assert (await environment.verify()).reward == 0.5
        async with episode(factory) as (environment, _):
            await say(environment, "alpha", "alpha")
            assert (await environment.verify()).reward == 1.0
    assert not children()


async def test_episodes_are_played_side_by_side_in_one_process() -> None:
    factory = build()
    async with factory.run(), episode(factory) as (first, _), episode(factory) as (second, _):
        assert len(children()) == 1
        await say(second, "alpha", "alpha")
        await say(first, "no", "no")
        assert ((await first.verify()).reward, (await second.verify()).reward) == (0.0, 1.0)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("index", "reason"),
    [(1, "EpisodeFailed: ToolError -> it broke"), (2, "RuntimeError: no such luck"), (3, "status 3: Segmentation fault")],
)
async def test_an_error_of_the_packages_fails_the_episode_with_its_reason(index: int, reason: str) -> None:
    factory = build()
    async with factory.run():
        async with episode(factory, index) as (environment, _):
            with pytest.raises(EnvironmentFailed, match=reason):
                await say(environment, "")
        async with episode(factory) as (environment, _):
            await say(environment, "alpha", "alpha")
            assert (await environment.verify()).reward == 1.0, "the next episode plays, in a new process where that ended"


@pytest.mark.integration
@pytest.mark.parametrize(("index", "reason"), [(6, "what is no reply"), (7, "a reply of over")])
async def test_what_is_no_reply_ends_the_process_and_not_the_worker(index: int, reason: str) -> None:
    factory = build()
    async with factory.run():
        async with episode(factory, index) as (environment, _):
            with pytest.raises(EnvironmentFailed, match=reason):
                await say(environment, "")
        async with episode(factory) as (environment, _):
            await say(environment, "alpha", "alpha")
            assert (await environment.verify()).reward == 1.0


async def test_a_reward_that_is_no_number_fails_the_episode() -> None:
    factory = build(f"{SPEC} reward=NaN")
    async with factory.run(), episode(factory) as (environment, _):
        with pytest.raises(EnvironmentFailed, match="HTTP Error 400"):
            await say(environment, "alpha", "alpha")


async def test_an_environment_that_cannot_be_loaded_fails_its_episodes_with_its_message() -> None:
    factory = build(f"{SPEC} 'broken=no data here'")
    async with factory.run():
        with pytest.raises(EnvironmentFailed, match="ValueError: no data here"):
            async with episode(factory):
                pass


def test_a_request_that_comes_while_the_process_ends_says_nothing_over_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Path(foreign_host.__file__).parent / "inside"
    monkeypatch.syspath_prepend(inside)
    runner = runpy.run_path(str(inside / "fleetbus_runner.py"))["Runner"]()
    loop = asyncio.new_event_loop()
    loop.close()
    runner._requests, requests = os.pipe()
    os.write(requests, b"{}\n")

    runner._read(asyncio.Queue(), loop)

    os.close(requests)


@pytest.mark.integration
@pytest.mark.parametrize("index", [4, 5])
async def test_an_episode_that_hangs_is_ended_when_it_is_closed(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled if it awaits; with all of its process if it blocks."""
    monkeypatch.setattr(foreign_host, "CANCEL_SECONDS", 0.5)
    factory = build()
    async with factory.run():
        async with episode(factory, index) as (environment, _):
            with anyio.move_on_after(0.5):
                await say(environment, "")
        async with episode(factory) as (environment, _):
            await say(environment, "alpha", "alpha")
            assert (await environment.verify()).reward == 1.0
    assert not children()


async def test_calls_of_other_roles_are_answered_and_not_trained() -> None:
    factory = build(f"{SPEC} other=true")
    async with factory.run(), episode(factory) as (environment, _):
        assert (await say(environment, "alpha", "alpha")).terminated
        assert [(each.turn, each.reason) for each in environment.list_untrained()] == [(1, "side_call")]


async def test_what_the_runner_starts_finds_no_pipes() -> None:
    factory = build()
    async with factory.run(), episode(factory) as (environment, _):
        left = list(environment._folder.parent.rglob("requests"))
        assert left == []
        await say(environment, "", "")


def test_an_interpreter_can_be_named_for_all_environments_or_for_one() -> None:
    named = Configuration(environment=EnvironmentSettings(python=sys.executable))
    build("verifiers:guess", named)
    build("inspect:guess", named)
    assert find_adapter(SPEC).name == find_adapter("verifiers:x").name == "verifiers"
    assert parse_keyed_specs(f"{SPEC}\nold={SPEC}") == {"": SPEC, "old": SPEC}


def test_up_checks_an_environment_with_the_interpreter_of_its_settings(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"key": "guess-0", "prompt": "p", "config": {"index": 0}}]))
    check_environment("verifiers:guess", str(tasks), python=sys.executable)
    with pytest.raises(UserError, match="no interpreter is named"):
        check_environment("verifiers:guess", str(tasks))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("verifiers:guess", "--environment-python PATH"),
        ("verifiers+python=/nowhere:guess", "'/nowhere' is no program"),
        (f"verifiers+python={sys.executable}:", "must be written as verifiers:NAME"),
        (f"inspect+python={sys.executable}:task words", "must be written as inspect:NAME"),
        (f"verifiers+python={sys.executable}:./nowhere", "there is no /.*nowhere"),
    ],
)
def test_what_is_missing_is_said_in_one_line(spec: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build(spec)
