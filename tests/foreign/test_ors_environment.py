"""Environments of the Open Reward Standard: the same tests on a double in this process and, with `just test-foreign`, on
servers of the packages `ors-sdk` and `openreward`. Faults, on the double alone, are in test_ors_faults.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fleetbus.core.text.prompts import NO_CALL
from fleetbus_schemas import Task, ToolCall
from fleetbus_workers.environment.adapters.ors import client as ors_client
from fleetbus_workers.environment.adapters.ors.client import SessionGone, ToolRaised
from fleetbus_workers.environment.adapters.ors.rewards import NONE_AT_ALL, NONE_AT_THE_END
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from tests.support.ors_episodes import build, episode, playing, read_words
from tests.support.ors_process import ors_server
from tests.support.ors_server import ors_double
from tests.support.tool_calls import call, read_step_text, say

REAL = [pytest.param(name, marks=[pytest.mark.foreign, pytest.mark.timeout(180)]) for name in ("ors", "openreward")]


@pytest.fixture(scope="module", params=["double", *REAL])
def real(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a real server; nothing for the double, which each test makes in its own event loop."""
    if request.param == "double":
        yield ""
        return
    with ors_server(request.param) as url:
        yield url


@pytest.fixture
async def url(real: str) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        yield real or (await stack.enter_async_context(ors_double())).url


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ors_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(ors_client, "LONGEST_PAUSE", 0.1)


async def test_the_policy_gets_prompt_and_tools_and_the_reward_is_the_sum(url: str) -> None:
    async with playing(url) as (environment, start):
        system, prompt = (str(message.content) for message in start.messages)
        assert '"name": "compare"' in system and "Say which of two words comes first." in system and '"first"' in system
        assert prompt.startswith("Sort these words.\n")
        words = read_words(start)
        step = await environment.step(call("compare", first=words[0], second=words[1]))
        assert read_step_text(step) == f"Tool result:\n{min(words[:2])}"
        assert (step.reward, step.terminated, step.tool_calls, step.tool_errors) == (-0.01, False, 1, 0)
        step = await environment.step(call("submit", words=sorted(words)))
        assert (step.reward, step.terminated, step.info) == (1.0, True, {"right": True})
        assert await environment.verify() == Verdict(reward=0.99)
        assert await environment.state() == {"server": url, "calls": 2, "finished": True}


async def test_the_last_reward_counts_where_the_task_says_so(url: str) -> None:
    async with playing(url, reward="last") as (environment, start):
        words = read_words(start)
        first = await environment.step(call("compare", first=words[0], second=words[1]))
        last = await environment.step(call("submit", words=sorted(words)))
        assert (first.reward, last.reward) == (-0.01, 1.01), "the parts add up to what the verdict is"
        assert await environment.verify() == Verdict(reward=1.0)


async def test_what_the_policy_does_wrong_is_an_observation(url: str) -> None:
    async with playing(url) as (environment, start):
        assert read_step_text(await environment.step(say("I think."))) == NO_CALL
        unknown = await environment.step(call("sort", words=[]))
        assert "unknown tool" in read_step_text(unknown) and (unknown.tool_errors, unknown.unrewarded) == (1, "")
        missing = await environment.step(call("submit"))
        assert "validation error" in read_step_text(missing) and (missing.tool_errors, missing.terminated) == (1, False)
        for arguments in ('{"words": NaN}', '{"words": ', "[1]", '"x"'):
            step = await environment.step(say(f'<tool_call>{{"name": "submit", "arguments": {arguments}}}</tool_call>'))
            assert not step.terminated and step.reward == 0.0, arguments
        step = await environment.step(call("submit", words=sorted(read_words(start))))
        assert step.terminated and await environment.verify() == Verdict(reward=1.0)


async def test_arguments_that_are_no_json_never_leave(url: str) -> None:
    async with playing(url, prompt="template") as (environment, _):
        for value in (float("nan"), "\ud800"):
            asked = ToolCall(name="submit", arguments={"words": value}, id="c")
            step = await environment.step(say("", asked))
            assert "no JSON" in str(step.messages[0].content) and step.tool_errors == 1


async def test_a_template_s_calls_are_answered_each_and_an_answer_without_one_ends_the_episode(url: str) -> None:
    async with playing(url, prompt="template") as (environment, start):
        assert {tool.name for tool in start.tools} >= {"compare", "submit"} and len(start.messages) == 1
        made = tuple(ToolCall(name="compare", arguments={"first": "a", "second": "b"}, id=text) for text in ("c1", "c2"))
        step = await environment.step(say("Two.", *made))
        assert [(message.role, message.tool_call_id) for message in step.messages] == [("tool", "c1"), ("tool", "c2")]
        assert (await environment.step(say("I am done."))).terminated
        assert await environment.verify() == Verdict(reward=-0.01)


async def test_an_episode_without_a_reward_has_no_verdict_and_the_reason(url: str) -> None:
    async with playing(url) as (environment, _):
        assert (await environment.step(say("It is done. <done>"))).terminated
        assert await environment.verify() == Verdict(reward=None, reason=NONE_AT_ALL)


@pytest.mark.parametrize("index", [3, 4])
async def test_nan_or_nothing_at_the_end_is_no_reward_whatever_came_before(url: str, index: int) -> None:
    async with playing(url, index, "trouble") as (environment, start):
        await environment.step(call("compare", first="a", second="b"))
        step = await environment.step(call("submit", words=read_words(start)))
        assert step.terminated and step.reward == 0.0 and "no number" in step.unrewarded
        assert await environment.verify() == Verdict(reward=None, reason=NONE_AT_THE_END)


async def test_an_environment_that_raises_fails_the_episode_with_its_words(url: str) -> None:
    async with playing(url, 2, "trouble") as (environment, _):
        with pytest.raises(ToolRaised, match="no dictionary"):
            await environment.step(call("submit", words=[]))


async def test_every_character_arrives(url: str) -> None:
    async with playing(url, 6, "trouble") as (environment, _):
        step = await environment.step(call("submit", words=[]))
        assert read_step_text(step) == "Tool result:\n" + "  \u2028\x85 ü\U0001f600 " * 1000
        assert await environment.verify() == Verdict(reward=0.5)


async def test_ten_megabytes_are_cut_and_their_reward_counts(url: str) -> None:
    async with playing(url, 7, "trouble") as (environment, _):
        step = await environment.step(call("submit", words=[]))
        assert len(read_step_text(step)) <= 32_768 and "TRUNCATED" in read_step_text(step)
        assert await environment.verify() == Verdict(reward=0.25)


@pytest.mark.parametrize(("index", "split"), [(50, "train"), (0, "nowhere")])
async def test_a_place_that_is_not_there_fails_the_episode(url: str, index: int, split: str) -> None:
    with pytest.raises(EnvironmentFailed, match="Invalid"):
        async with playing(url, index, split):
            pass


@pytest.mark.parametrize("config", [{"split": ""}, {"index": "1"}, {"index": True}, {"reward": "mean"}])
async def test_a_task_without_a_place_fails_the_episode(url: str, config: dict[str, Any]) -> None:
    given: dict[str, Any] = {"index": 0, "split": "train"} | config
    with pytest.raises(EnvironmentFailed, match=r"needs an index and a split|must be sum or last"):
        async with playing(url, **given):
            pass


async def test_an_environment_that_is_not_there_is_named_with_those_that_are(url: str) -> None:
    for name, words in (("#chess", "no environment 'chess'; it has order, shelves"), ("", "it has order, shelves")):
        factory = build(f"ors:{url}{name}")
        async with factory.run():
            with pytest.raises(EnvironmentFailed, match=words):
                async with episode(factory):
                    pass


async def test_a_session_that_is_deleted_elsewhere_is_gone_and_a_killed_worker_s_is_released(url: str) -> None:
    async with playing(url) as (environment, start):
        factory = build(f"ors:{url}#order")
        async with factory.run():
            await factory().release(Task(key="t"), environment.held)
        with pytest.raises(SessionGone):
            await environment.step(call("submit", words=read_words(start)))
