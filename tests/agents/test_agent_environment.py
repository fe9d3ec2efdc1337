"""An agent that owns its loop, played by hand: its model calls are the turns."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.adapters.agent import host as host_module
from fleetbus_workers.environment.adapters.agent.environment import AgentEnvironment, FolderTools
from fleetbus_workers.environment.adapters.agent.host import AgentHost
from fleetbus_workers.environment.adapters.agent.sessions import SESSION_OVER
from fleetbus_workers.environment.adapters.common.fresh_python import FreshPython
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable
from fleetbus_workers.environment.isolation.sandbox.backends import require_isolation
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.processes import children

AGENT = Path(__file__).with_name("scripted_agent.py")
SPEC = f"agent:{sys.executable} {AGENT}"
REFUSING = Configuration(environment=EnvironmentSettings(agent_formats="refused"))


class ScriptedGrader:
    """Gives one verdict and remembers what it was asked about."""

    def __init__(self, reward: float) -> None:
        self.reward = reward
        self.final_answer: str | None = None

    async def verify(self, code: str, *, final_answer: str | None, conversation: Any, tools: Any) -> Verdict:
        self.final_answer = final_answer
        return Verdict(reward=self.reward)


@asynccontextmanager
async def playing(
    spec: str = SPEC, grader: Any = None, configuration: Configuration | None = None, **config: Any
) -> AsyncIterator[tuple[AgentEnvironment, Any]]:
    settings = configuration or Configuration()
    posting = msgspec.structs.replace(settings.environment, agent_reward_url=True)
    settings = msgspec.structs.replace(settings, environment=posting)
    factory = build_environment_factory(spec, verifier=grader, configuration=settings)
    async with factory.run():
        environment: Any = factory()
        try:
            verifier = "graded" if grader is not None else ""
            await environment.open(Task(key="t", prompt="Say", config=config, verifier=verifier))
            yield environment, await environment.reset()
        finally:
            await environment.close()
    assert not children()


def act(text: str, *calls: ToolCall) -> Action:
    return Action(episode_id="e", attempt=1, turn=0, text=text, tool_calls=calls)


async def test_the_calls_of_an_agent_are_the_turns_of_its_episode() -> None:
    async with playing(calls=2) as (environment, start):
        assert [message.content for message in start.messages] == ["Be brief.", "Say 0"]
        step = await environment.step(act("<think>hm</think>one"))
        assert [message.content for message in step.messages] == ["Say 1"] and step.context is None
        assert (await environment.step(act("two"))).terminated
        answers = await environment_tools(environment).call_tool("read_file", {"path": "answers.json"})
        assert json.loads(answers) == ["one", "two"]


def environment_tools(environment: AgentEnvironment) -> FolderTools:
    return FolderTools(environment._folder, FreshPython(environment._host.make_session))


async def test_a_function_of_the_users_module_is_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(AGENT.parent)
    async with playing("agent:scripted_agent:play", calls=1) as (environment, start):
        assert start.messages[1].content == "Say 0"
        assert (await environment.step(act("one"))).terminated


async def test_the_agents_own_reward_is_the_verdict() -> None:
    async with playing(calls=1, reward=0.25) as (environment, _):
        assert (await environment.step(act("one"))).terminated
        assert (await environment.verify()).reward == 0.25


async def test_a_posted_null_is_no_grade() -> None:
    async with playing(calls=1, reward=None) as (environment, _):
        await environment.step(act("one"))
        assert (await environment.verify()).reward is None


async def test_without_a_reward_of_its_own_the_verifier_grades_the_last_answer() -> None:
    grader = ScriptedGrader(0.5)
    async with playing(grader=grader, calls=1) as (environment, _):
        await environment.step(act("the answer"))
        assert (await environment.verify()).reward == 0.5
    assert grader.final_answer == "the answer"


async def test_a_spent_budget_is_told_in_words_and_the_agent_ends_by_itself() -> None:
    async with playing(grader=ScriptedGrader(0.0), calls=3) as (environment, _):
        step = await environment.step(act("one"))
        assert not step.terminated
        with anyio.fail_after(20):
            await environment.verify()  # no further turn is played
        answers = json.loads((environment._folder / "answers.json").read_text())
        assert answers == ["one", SESSION_OVER, SESSION_OVER]


async def test_an_agent_that_fails_is_no_doing_of_the_policys() -> None:
    async with playing(calls=1, fail_at_end=True) as (environment, _):
        with pytest.raises(EnvironmentFailed, match="ended with status 1: it broke"):
            await environment.step(act("one"))


@pytest.mark.parametrize(
    ("said", "config", "problem"),
    [
        ("", {"fail_at_end": True}, "no text and no call"),
        ("no JSON", {"repair": "anew"}, "instead of using it the agent asked for another: response_format is not supported"),
    ],
)
async def test_an_agent_that_fails_for_an_answer_that_it_cannot_use_is_the_policys_doing(
    said: str, config: dict[str, Any], problem: str
) -> None:
    async with playing(calls=1, configuration=REFUSING, **config) as (environment, _):
        step = await environment.step(act(said))
        assert step.terminated and (await environment.verify()).reward == 0.0
        fault = step.info["agent_failed_on_answer"]
        assert fault["turn"] == 0 and fault["problems"][0].startswith(problem) and "status 1" in fault["ended"]


@pytest.mark.parametrize(("config", "reward"), [({"repair": "with the answer"}, "0"), ({"repair": "anew"}, "")])
async def test_a_format_that_belongs_to_the_agents_way_or_that_no_reward_is_set_for_is_no_fault_of_the_policys(
    config: dict[str, Any], reward: str
) -> None:
    settings = Configuration(environment=EnvironmentSettings(agent_crash_reward=reward, agent_formats="refused"))
    async with playing(calls=1, configuration=settings, **config) as (environment, _):
        with pytest.raises(EnvironmentFailed, match="ended with status 1"):
            await environment.step(act("no JSON"))


async def test_an_agent_that_breaks_for_an_answer_that_is_not_of_the_format_that_it_was_told_is_the_policys_doing() -> None:
    async with playing(calls=1, repair="anew", fail_at_end=True) as (environment, _):
        step = await environment.step(act("no JSON"))
        told = [message.content for message in step.messages if message.role == "system"]
        assert told[-1] == "The format of your answer: one JSON object and nothing else."
        step = await environment.step(act("still none"))
        assert step.terminated and (await environment.verify()).reward == 0.0
        assert step.info["agent_failed_on_answer"]["problems"] == ["no JSON, which response_format asks for"]
        assert (step.info["formats_asked"], step.info["formats_kept"]) == (1, 0)


async def test_an_agent_that_fails_after_its_reward_keeps_it() -> None:
    async with playing(calls=1, fail_at_end=True, reward=1) as (environment, _):
        assert (await environment.step(act("one"))).terminated
        assert (await environment.verify()).reward == 1.0


async def test_an_agent_that_never_calls_a_model_is_named_with_its_last_line() -> None:
    with pytest.raises(EnvironmentFailed, match="ended before it called a model: no such luck"):
        async with playing(exit=3):
            pass


async def test_an_agent_that_hangs_is_ended_with_its_episode() -> None:
    async with playing(calls=1, linger=600) as (environment, _):
        with anyio.move_on_after(0.5) as waiting:
            await environment.step(act("one"))
        assert waiting.cancelled_caught


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("agent:", "names no agent"),
        ("agent:no-such-command --fast", "command 'no-such-command' not found"),
        ("agent:'unclosed", "cannot be read"),
        ("agent:no_such_module:play", "no_such_module"),
    ],
)
def test_an_agent_that_is_not_there_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_environment_factory(spec, verifier=None)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        Configuration(environment=EnvironmentSettings(compaction="drop")),
        Configuration(inference=InferenceSettings(reasoning="template")),
    ],
    ids=["compaction", "reasoning"],
)
def test_a_context_that_others_would_change_is_refused(settings: Configuration) -> None:
    with pytest.raises(UserError, match="decides about its context itself"):
        build_environment_factory(SPEC, verifier=None, configuration=settings)  # type: ignore[arg-type]


async def test_a_file_outside_of_the_agents_folder_is_not_read(tmp_path: Path) -> None:
    async with playing(calls=1) as (environment, _):
        (environment._folder / "link").symlink_to("/etc/passwd")
        for path in ("../../etc/passwd", "/etc/passwd", "link", ".", ""):
            with pytest.raises(LookupError):
                await environment_tools(environment).call_tool("read_file", {"path": path})
        await environment.step(act("one"))


async def test_a_verifier_calls_what_the_agent_wrote_in_a_sandbox_and_has_no_other_tool() -> None:
    try:
        require_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    async with playing(calls=1) as (environment, _):
        tools = environment_tools(environment)
        asked: dict[str, object] = {"code": "def add(a, b): return a + b", "function": "add", "arguments": [[1, 2], ["x"]]}
        called = await tools.call_tool("python_call", asked)
        assert [(each["value"], bool(each["error"])) for each in called["results"]] == [(3, False), (None, True)]
        assert (await tools.call_tool("python_fresh", {"code": "print(1)"}))["stdout"] == "1\n"
        with pytest.raises(LookupError, match="read_file, python_fresh and python_call"):
            await tools.call_tool("python", {"code": "1"})
        await environment.step(act("one"))


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentHost]:
    """One that lets two agents start at a time."""
    monkeypatch.setattr(host_module, "count_processors", lambda: 1)
    host = AgentHost(["true"], policy="off", passed=())
    async with host.run():
        yield host


async def test_an_agent_starts_when_one_of_those_that_start_has_called(host: AgentHost) -> None:
    first, second, third = (anyio.Event() for _ in range(3))
    await host.take_place(first)
    await host.take_place(second)
    with anyio.move_on_after(0) as early:
        await host.take_place(third)
    assert early.cancelled_caught
    first.set()
    with anyio.fail_after(20):
        await host.take_place(third)


async def test_agents_that_load_for_long_keep_no_others_from_starting(host: AgentHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "START_SECONDS", 0.0)
    with anyio.fail_after(20):
        for _ in range(5):
            await host.take_place(anyio.Event())


async def test_an_agent_that_has_called_or_ended_is_no_longer_starting() -> None:
    async with playing(calls=1) as (called, _):
        assert called._started.is_set()
    grader: Any = ScriptedGrader(0.0)
    factory = build_environment_factory(f"agent:{sys.executable} -c 1", verifier=grader, configuration=Configuration())
    async with factory.run():
        environment: Any = factory()
        await environment.open(Task(key="t", prompt="Say", verifier="graded"))
        await environment.wait_to_start()
        with pytest.raises(EnvironmentFailed, match="ended before it called"):
            await environment.reset()
        await environment.close()
        assert environment._started.is_set()
