"""Every way in which a server of the Open Reward Standard can go wrong, by the double in this process, which is told to."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Image, Text
from fleetbus_workers.environment import failure_location
from fleetbus_workers.environment.adapters.ors import client as ors_client
from fleetbus_workers.environment.adapters.ors.address import parse_address
from fleetbus_workers.environment.adapters.ors.blocks import show_blocks
from fleetbus_workers.environment.adapters.ors.client import Refused, SessionGone, Unreachable
from fleetbus_workers.environment.adapters.ors.environment import OrsEnvironment
from fleetbus_workers.environment.adapters.ors.messages import BadAnswer, Block
from fleetbus_workers.environment.adapters.ors.server import OrsServer
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.images.png import encode_rgb_png
from tests.support.ors_episodes import build, episode, playing, read_words
from tests.support.ors_server import OrsDouble, ors_double
from tests.support.tool_calls import NoGrader, call, read_step_text, say


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ors_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(ors_client, "LONGEST_PAUSE", 0.1)


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


@pytest.mark.integration
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
