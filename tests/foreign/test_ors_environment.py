"""Environments of the Open Reward Standard: the same tests on a double in this process and, with `just test-foreign`, on
servers of the packages `ors-sdk` and `openreward`; then every way in which a server can go wrong, on the double alone."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from fleetbus.config.settings import Configuration, LimitSettings
from fleetbus.core.text.prompts import NO_CALL
from fleetbus.errors import UserError
from fleetbus_schemas import Image, Task, Text, ToolCall
from fleetbus_workers.environment import failure_location
from fleetbus_workers.environment.adapters.ors import client as ors_client
from fleetbus_workers.environment.adapters.ors.address import parse_address
from fleetbus_workers.environment.adapters.ors.blocks import show_blocks
from fleetbus_workers.environment.adapters.ors.client import Refused, SessionGone, ToolRaised, Unreachable
from fleetbus_workers.environment.adapters.ors.environment import OrsEnvironment
from fleetbus_workers.environment.adapters.ors.messages import BadAnswer, Block
from fleetbus_workers.environment.adapters.ors.rewards import NONE_AT_ALL, NONE_AT_THE_END
from fleetbus_workers.environment.adapters.ors.server import OrsServer
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.images.png import encode_rgb_png
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.ors_process import ors_server
from tests.support.ors_server import OrsDouble, ors_double
from tests.support.tool_calls import NoGrader, call, read_step_text, say

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


def build(spec: str, *, prompt: Any = "compact", seconds: float = 30) -> Any:
    settings = Configuration(limits=LimitSettings(tool_call=seconds))
    return build_environment_factory(spec, verifier=NoGrader(), prompt=prompt, configuration=settings)


@asynccontextmanager
async def episode(factory: Any, index: int = 0, split: str = "train", **config: Any) -> AsyncIterator[tuple[Any, Any]]:
    environment = factory()
    with anyio.fail_after(50):
        try:
            await environment.open(Task(key="t", prompt="", config={"split": split, "index": index, **config}))
            yield environment, await environment.reset()
        finally:
            await environment.close()


@asynccontextmanager
async def playing(url: str, index: int = 0, split: str = "train", *, prompt: Any = "compact", **config: Any) -> Any:
    factory = build(f"ors:{url}#Order", prompt=prompt)
    async with factory.run(), episode(factory, index, split, **config) as (environment, start):
        yield environment, start


def read_words(start: Any) -> list[str]:
    return str(start.messages[-1].content).splitlines()[1].split()


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


# What only the double can be made to do.


@asynccontextmanager
async def faulty(*faults: str, seconds: float = 30, **options: Any) -> AsyncIterator[tuple[OrsDouble, Any]]:
    async with ors_double(**options) as double:
        factory = build(f"ors:{double.url}#order", seconds=seconds)
        async with factory.run(), episode(factory) as (environment, _):
            double.faults.extend(faults)
            yield double, environment
        assert not double.sessions, "every session is deleted"


COMPARE = call("compare", first="a", second="b")


@pytest.mark.parametrize(
    "faults",
    [("cut after the name",), ("cut in the result",), ("cut after the name", "cut in the result", "cut before the name")],
)
async def test_a_call_that_has_a_name_is_resumed_and_runs_once(faults: tuple[str, ...]) -> None:
    async with faulty(*faults) as (double, environment):
        step = await environment.step(COMPARE)
        assert (step.reward, double.counts["runs"], double.counts["order/call"]) == (-0.01, 1, len(faults) + 1)


@pytest.mark.parametrize("fault", ["cut before the name", "half an event"])
async def test_a_call_that_broke_before_its_name_came_is_not_sent_again(fault: str) -> None:
    async with faulty(fault) as (double, environment):
        with pytest.raises(Unreachable) as caught:
            await environment.step(COMPARE)
        assert caught.value.may_have_acted and (double.counts["runs"], double.counts["order/call"]) == (1, 1)


async def test_a_call_that_a_proxy_says_never_ran_is_sent_again_and_no_other_503_is() -> None:
    async with faulty(*["starting"] * 9) as (double, environment):
        assert (await environment.step(COMPARE)).reward == -0.01
        assert (double.counts["runs"], double.counts["order/call"]) == (1, 10)
    for fault in ("503", "500"):
        async with faulty(fault) as (double, environment):
            with pytest.raises(Refused, match="it is broken"):
                await environment.step(COMPARE)
            assert double.counts["order/call"] == 1


@pytest.mark.parametrize("fault", ["hang", "hang after the name"])
async def test_a_call_that_hangs_ends_with_its_limit(fault: str) -> None:
    async with faulty(fault, seconds=0.5) as (_, environment):
        with pytest.raises(Unreachable, match=r"took longer than 0\.5 s"):
            await environment.step(COMPARE)


async def test_a_silent_stream_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ors_client, "SILENT_SECONDS", 0.3)
    async with faulty("hang after the name") as (double, environment):
        assert (await environment.step(COMPARE)).reward == -0.01 and double.counts["runs"] == 1


@pytest.mark.parametrize("fault", ["no json", "text as reward", "deep", "endless"])
async def test_what_cannot_be_read_fails_the_episode(fault: str) -> None:
    async with faulty(fault) as (_, environment):
        with pytest.raises(BadAnswer):
            await environment.step(COMPARE)


async def test_text_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    async with faulty("surrogates") as (_, environment):
        assert read_step_text(await environment.step(COMPARE)) == "Tool result:\n? \U0001f600"


async def test_a_tool_named_like_a_builtin_is_a_tool() -> None:
    async with faulty() as (_, environment):
        step = await environment.step(call("print"))
        assert read_step_text(step) == "Tool result:\nthanks" and "gave no reward" in step.unrewarded


async def test_a_created_session_whose_answer_got_lost_is_the_session() -> None:
    async with ors_double() as double:
        double.faults.append("create answer lost")
        async with playing(double.url) as (environment, _):
            assert (await environment.step(COMPARE)).reward == -0.01 and len(double.sessions) == 1


async def test_sessions_are_pinged_while_the_policy_thinks_and_one_that_expired_is_known() -> None:
    async with ors_double() as double:
        server = OrsServer(parse_address(f"{double.url}#order"), ping_seconds=0.05)
        async with server.run(), episode(lambda: OrsEnvironment(server, grader=NoGrader())) as (environment, _):
            await double.wait_for("ping", 3)
            double.sessions.clear()
            await double.wait_for("ping", double.counts["ping"] + 1)
            await anyio.sleep(0.2)
            known = double.counts["ping"]
            await anyio.sleep(0.2)
            assert double.counts["ping"] == known, "what is gone is not asked for again"
            with pytest.raises(SessionGone, match="Active environment not found"):
                await environment.step(COMPARE)
            assert not double.counts["order/call"], "nothing is asked of a session that is known to be gone"


async def test_a_session_is_not_pinged_before_it_is_created() -> None:
    async with ors_double() as double:
        server = OrsServer(parse_address(f"{double.url}#order"), ping_seconds=0.02)
        async with server.run():
            session = await server.name_session()
            await anyio.sleep(0.2)
            assert not double.counts["ping"], "the server would say that there is no such session"
            await session.create("train", 0)
            await double.wait_for("ping", 2)
            assert (await session.call("compare", {"first": "a", "second": "b"}, 5)).ok
            await server.close_session(session)


async def test_a_call_whose_name_the_server_forgot_is_lost() -> None:
    async with faulty("cut after the name", "forget") as (double, environment):
        with pytest.raises(SessionGone, match="does not know the call"):
            await environment.step(COMPARE)
        assert double.counts["runs"] == 1


PIXEL = base64.b64encode(encode_rgb_png(np.zeros((2, 3, 3), np.uint8))).decode()


async def test_images_follow_the_text_or_are_words() -> None:
    blocks = (Block(text="Look:"), Block(type="image", data=PIXEL, mimeType="image/png"), Block(text="Well?"))
    stored: list[Any] = []

    async def store(picture: Any) -> Image:
        stored.append(picture)
        return Image(object="0" * 64)

    assert await show_blocks(blocks, None, str) == "Look:\n[image, image/png]\nWell?"
    text, image = await show_blocks(blocks, store, str, " (more)")
    assert text == Text(text="Look:\n[image, image/png]\nWell? (more)") and (image.width, image.height) == (3, 2) and stored
    with pytest.raises(EnvironmentFailed, match="cannot be read"):
        await show_blocks((Block(type="image", data="?"),), store, str)


async def test_a_cancelled_call_leaves_no_session() -> None:
    async with faulty("hang") as (double, environment):
        with anyio.move_on_after(0.3) as scope:
            await environment.step(COMPARE)
        assert scope.cancelled_caught and double.sessions
        await environment.close()
        assert not double.sessions


@pytest.mark.parametrize("end", ["", "\n"])
async def test_the_key_is_sent_in_a_header_and_stands_nowhere_else(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("ORS_API_KEY", f"k-123456789{end}")
    failure_location._build_redactor.cache_clear()
    async with faulty("key", key="k-123456789") as (double, environment):
        step = await environment.step(COMPARE)
        assert "k-123456789" not in repr(step) and "[redacted]" in read_step_text(step)
        assert (await environment.verify()).reward is None, "NaN is no reward"
        assert all(headers["x-api-key"] == "k-123456789" for headers in double.headers)
    async with ors_double(key="another") as double:
        with pytest.raises(EnvironmentFailed) as caught:
            async with playing(double.url):
                pass
    failure_location._build_redactor.cache_clear()
    assert "401 wrong key" in str(caught.value) and "k-123456789" not in str(caught.value)


@pytest.mark.parametrize("key", ["schlüssel", "one\ntwo"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ORS_API_KEY", key)
    with pytest.raises(UserError, match="ORS_API_KEY must have ASCII") as refused:
        build("ors:http://127.0.0.1:9#order")
    assert key not in str(refused.value)


async def test_a_final_answer_is_graded_by_the_terminal_tool() -> None:
    async with ors_double(terminal=True) as double, playing(double.url, prompt="template") as (environment, start):
        assert "grade" not in {tool.name for tool in start.tools}
        words = read_words(start)
        step = await environment.step(say(" ".join(sorted(words))))
        assert (step.terminated, step.reward, step.tool_calls) == (True, 1.0, 1)
        assert await environment.verify() == Verdict(reward=1.0)


async def test_a_server_that_is_killed_loses_its_sessions_alone() -> None:
    async with ors_double() as double:
        factory = build(f"ors:{double.url}#order")
        async with factory.run():
            async with episode(factory) as (environment, _):
                await double.server.kill()
                async with anyio.create_task_group() as group:
                    group.start_soon(double.server.start)
                    with pytest.raises((SessionGone, Unreachable)):
                        await environment.step(COMPARE)
            async with episode(factory) as (environment, start):
                await environment.step(call("submit", words=sorted(read_words(start))))
                assert await environment.verify() == Verdict(reward=1.0)
