"""Remote gyms: both generations of the protocol, one action per step whatever gets lost, and servers that come and go."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_schemas import Image, Task, Text
from fleetbus_workers.environment.adapters.remote_gym.client import (
    RemoteEnvironmentError,
    RequestRefused,
    ServerPool,
    ServerUnreachable,
    SessionGone,
)
from fleetbus_workers.environment.adapters.remote_gym.config import RemoteGymConfig, parse_urls, read_config
from fleetbus_workers.environment.adapters.remote_gym.environment import RemoteGymEnvironment
from fleetbus_workers.environment.adapters.remote_gym.wire import WireError, decode_response, encode_image, encode_request
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage, insert_images
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.environment.task_permissions import TaskPermissions
from tests.support.remote_gym_server import RemoteGymDouble, png, remote_gym_double
from tests.support.tool_calls import NoGrader, say

ANY_SERVER = TaskPermissions(urls=("*",), variables=("MY_KEY",))
FAST = {"backoff": 0.01, "max_delay": 0.05, "timeout": 20.0}


def make_task(*doubles: RemoteGymDouble, **config: Any) -> Task:
    return Task(key="t", prompt="Climb.", seed=5, config={"base_urls": [each.url for each in doubles], **FAST, **config})


@asynccontextmanager
async def playing(
    task: Task, *, store_image: Any = None, pool: ServerPool | None = None
) -> AsyncIterator[tuple[RemoteGymEnvironment, Start]]:
    pool = pool or ServerPool()
    with anyio.fail_after(50):
        async with pool.run():
            environment = RemoteGymEnvironment(pool, (), store_image=store_image, permissions=ANY_SERVER)
            try:
                await environment.open(task)
                yield environment, await environment.reset()
            finally:
                await environment.close()


@pytest.mark.parametrize("old", [False, True])
async def test_an_episode_is_played_and_graded_by_the_sum_of_its_rewards(old: bool) -> None:
    double = RemoteGymDouble(goal=2, old=old)
    async with remote_gym_double(double):
        async with playing(make_task(double, level=3)) as (environment, start):
            assert [(message.role, message.content) for message in start.messages] == [
                ("system", "Say up."),
                ("user", "Climb.\n\nseed 5, at 0"),
            ]
            step = await environment.step(say("up"))
            assert (step.messages[0].content, step.reward, step.terminated) == ("at 1", 0.0, False)
            step = await environment.step(say("up"))
            assert (step.messages[0].content, step.reward, step.terminated, step.truncated) == ("at 2", 1.0, True, False)
            assert step.info == {"success": True}
            assert (await environment.state())["info"] == {"success": True}
            assert await environment.verify() == Verdict(reward=1.0)
        assert double.configs == [{"level": 3}], "the client's own keys are not the environment's"
        assert double.sessions == {}


async def test_truncation_is_told_from_the_end() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double), playing(make_task(double)) as (environment, _):
        step = await environment.step(say("give up"))
        assert (step.terminated, step.truncated) == (False, True)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
async def test_images_arrive_as_rgb_where_they_stand_in_the_text(mode: str) -> None:
    kept: list[EncodedImage] = []

    async def store_image(picture: EncodedImage) -> Image:
        kept.append(picture)
        return Image(object=f"hash-{len(kept)}", media_type=picture.media_type)

    double = RemoteGymDouble(images=mode)
    async with remote_gym_double(double), playing(make_task(double), store_image=store_image) as (environment, start):
        seen, picture, rest = start.messages[1].content
        assert isinstance(seen, Text)
        assert isinstance(rest, Text)
        assert (seen.text, rest.text) == ("Climb.\n\nsee ", " seed 5, at 0")
        assert picture == Image(object="hash-1", media_type="image/png", width=16, height=16)
        await environment.step(say("up"))
    for each in kept:
        with Pillow.open(io.BytesIO(each.data)) as image, Pillow.open(io.BytesIO(png(mode))) as sent:
            assert image.mode == "RGB"
            assert image.tobytes() == sent.convert("RGB").tobytes()


async def test_without_a_bucket_a_word_stands_for_each_image() -> None:
    double = RemoteGymDouble(images="RGB")
    async with remote_gym_double(double), playing(make_task(double)) as (_, start):
        assert start.messages[1].content == "Climb.\n\nsee [image, 16x16] seed 5, at 0"


async def test_a_step_whose_answer_got_lost_is_not_executed_twice() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double), playing(make_task(double)) as (environment, _):
        double.lose["step"] = 1
        with pytest.raises(ServerUnreachable) as caught:
            await environment.step(say("up"))
        assert isinstance(caught.value, EnvironmentFailed)
        assert double.executed["step"] == 1


@pytest.mark.parametrize("told", ["by the server", "by the task"])
async def test_a_server_that_remembers_gets_the_same_bytes_again_and_steps_once(told: str) -> None:
    double = RemoteGymDouble(remembers=True)
    async with remote_gym_double(double):
        task = make_task(double, idempotent=told == "by the task")
        async with playing(task) as (environment, _):
            double.lose["step"] = 2
            assert (await environment.step(say("up"))).messages[0].content == "at 1"
            assert double.executed["step"] == 1
            boundaries = [boundary for method, boundary in double.requests if method == "step"]
            assert len(boundaries) == 3
            assert len(set(boundaries)) == 1


@pytest.mark.parametrize("method", ["connect", "system_prompt"])
async def test_what_reads_or_begins_anew_is_repeated_when_its_answer_got_lost(method: str) -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double):
        double.lose[method] = 2
        async with playing(make_task(double)) as (environment, _):
            assert double.executed[method] == 3
            assert (await environment.step(say("up"))).reward == 0.0


async def test_a_busy_server_is_asked_again_and_not_taken_for_a_failure() -> None:
    double = RemoteGymDouble(goal=1)
    async with remote_gym_double(double):
        double.busy.update(connect=9, step=9)
        async with playing(make_task(double, retries=0)) as (environment, _):
            assert (await environment.step(say("up"))).terminated
            assert double.executed["step"] == 1


async def test_a_full_server_makes_episodes_wait_and_fails_none() -> None:
    double = RemoteGymDouble(goal=1, sessions=2)
    done: list[int] = []

    async def play(pool: ServerPool, number: int) -> None:
        environment = RemoteGymEnvironment(pool, (), permissions=ANY_SERVER)
        await environment.open(make_task(double))
        await environment.reset()
        assert (await environment.step(say("up"))).terminated
        await environment.close()
        done.append(number)

    async with remote_gym_double(double):
        pool = ServerPool()
        with anyio.fail_after(50):
            async with pool.run(), anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(play, pool, number)
    assert sorted(done) == list(range(10))
    assert double.most_sessions <= 2


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        ("raise", RemoteEnvironmentError, "the world broke"),
        ("unusable", EnvironmentFailed, "its world is gone"),
        ("\ud800", RequestRefused, "cannot be sent"),
    ],
)
async def test_what_the_server_cannot_do_is_an_error_at_once(action: str, error: type[Exception], words: str) -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double), playing(make_task(double)) as (environment, _):
        with pytest.raises(error, match=words):
            await environment.step(say(action))
        assert double.executed["step"] <= 1


async def test_a_lost_session_is_told_at_once_and_close_does_not_mind() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double), playing(make_task(double)) as (environment, _):
        double.sessions.clear()
        with pytest.raises(SessionGone):
            await environment.step(say("up"))
        assert [method for method, _ in double.requests].count("step") == 1
        await environment.close()
        assert [method for method, _ in double.requests].count("close") == 1


async def test_a_close_whose_answer_got_lost_is_done_all_the_same() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double):
        async with playing(make_task(double)):
            double.lose["close"] = 1
        assert [method for method, _ in double.requests].count("close") == 2
        assert double.sessions == {}


async def test_a_wrong_key_is_refused_once_and_is_not_told() -> None:
    double = RemoteGymDouble(key="right")
    async with remote_gym_double(double):
        with pytest.raises(RequestRefused, match="unauthorized") as caught:
            async with playing(make_task(double)):
                pass
        assert len(double.requests) == 1
        assert "right" not in str(caught.value)


async def test_the_key_comes_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "right")
    double = RemoteGymDouble(key="right")
    async with remote_gym_double(double), playing(make_task(double, token="$MY_KEY")) as (environment, _):
        await environment.step(say("up"))
    assert double.configs == [{}]


async def test_sessions_spread_over_the_servers() -> None:
    doubles = [RemoteGymDouble() for _ in range(3)]
    async with remote_gym_double(*doubles):
        pool = ServerPool()
        async with pool.run():
            environments = [RemoteGymEnvironment(pool, (), permissions=ANY_SERVER) for _ in range(9)]
            for environment in environments:
                await environment.open(make_task(*doubles))
            assert [len(double.sessions) for double in doubles] == [3, 3, 3]
            for environment in environments:
                await environment.close()


async def test_an_episode_moves_on_before_its_first_step_and_not_after_it() -> None:
    first, second = RemoteGymDouble(), RemoteGymDouble()
    async with remote_gym_double(first, second):
        pool = ServerPool(draw=lambda: 0.5)
        with anyio.fail_after(50):
            async with pool.run():
                environment = RemoteGymEnvironment(pool, (), permissions=ANY_SERVER)
                await environment.open(make_task(first, second, retries=0))
                assert len(first.sessions) == 1
                first.kill()
                start = await environment.reset()
                assert start.messages[1].content == "Climb.\n\nseed 5, at 0"
                await environment.step(say("up"))
                second.kill()
                with pytest.raises(ServerUnreachable):
                    await environment.step(say("up"))
                await environment.close()


async def test_a_dead_server_in_the_list_costs_nobody_an_episode() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double):
        task = make_task(double, base_urls=f"http://127.0.0.1:1;{double.url}")
        for _ in range(3):
            async with playing(task) as (environment, _):
                await environment.step(say("up"))


async def test_a_step_that_is_cancelled_leaves_a_session_that_can_be_closed() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double):
        async with playing(make_task(double)) as (environment, _), anyio.create_task_group() as group:
            group.start_soon(environment.step, say("hang"))
            await double.hanging.wait()
            group.cancel_scope.cancel()
        assert double.sessions == {}


async def test_a_reward_that_is_no_number_is_passed_on_as_such() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double), playing(make_task(double)) as (environment, _):
        step = await environment.step(say("nan"))
        assert step.reward != step.reward, "the session above makes `verifier_unknown` of it"


def test_the_names_of_the_protocol_s_own_client_are_understood() -> None:
    given = {
        "base_urls": "http://a:1; http://b:2\n# http://c",
        "timeout": 60,
        "retries": 8,
        "backoff": 2.0,
        "max_delay": 64,
        "backoff_jitter_min": 0.7,
        "backoff_jitter_range": 0.6,
        "failover_after_failures": 4,
        "log_retries": False,
        "max_steps": 100,
    }
    config, remote = read_config(given, (), ANY_SERVER)
    assert (config.base_urls, config.retries, config.failover_after_failures) == (("http://a:1", "http://b:2"), 8, 4)
    assert remote == {"max_steps": 100}
    assert [config.pause(failures, lambda: 0.5) for failures in (1, 2, 3, 50)] == [2, 4, 8, 64]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no remote-gym server"),
        ({"base_urls": "ftp://x"}, "is not an address"),
        ({"base_urls": "ftp://u:secret@x"}, "is not an address"),
        ({"base_urls": "http://u:secret@x"}, "GYM_API_KEY"),
        ({"base_urls": [1]}, "list of URLs"),
        ({"base_urls": "http://x", "timeout": "long"}, "timeout"),
        ({"base_urls": "http://x", "timeout": 0}, "positive"),
        ({"base_urls": "http://x", "token": "secret"}, "environment variable"),
        ({"url_file": "/no/such/file"}, "names no files"),
    ],
)
def test_a_bad_config_is_one_line_without_secrets(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(config, (), ANY_SERVER)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_the_spec_names_default_servers() -> None:
    double = RemoteGymDouble()
    async with remote_gym_double(double):
        factory = build_environment_factory(f"remote-gym:{double.url}", verifier=None)  # type: ignore[arg-type]
        async with factory.run():
            environment = factory()
            await environment.open(Task(key="t"))
            assert len((await environment.reset()).messages) == 2
            await environment.close()
    with pytest.raises(UserError, match="is not an address"):
        build_environment_factory("remote-gym:nonsense", verifier=NoGrader())


@pytest.mark.parametrize("payload", [b"\r\n", b"--\r\n--", bytes(range(256)), b" \t", b""])
def test_image_bytes_survive_whatever_they_are(payload: bytes) -> None:
    head = (
        b'--b\r\nContent-Disposition: form-data; name="data"\r\nContent-Type: application/json\r\n\r\n{"obs": "a\\r\\n--b"}\r\n'
    )
    image = b'--b\r\nContent-Disposition: form-data; name="images"\r\nContent-Type: image/png\r\n\r\n' + payload + b"\r\n"
    decoded = decode_response('multipart/mixed; boundary="b"', head + image + b"--b--\r\n")
    assert decoded.images == (payload,)
    assert decoded.fields == {"obs": "a\r\n--b"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<p>"),
        ("multipart/mixed", b"x"),
        ('multipart/mixed; boundary="b"', b"--c\r\n"),
        ('multipart/mixed; boundary="b"', b"--b--\r\n"),
        ("multipart/mixed" + ";a=b" * 100_000 + "; boundary=b", b"--b--\r\n"),
        ("application/json", b"[1]"),
        ("application/json", b"{"),
    ],
)
def test_a_body_that_is_none_of_the_protocol_is_named(kind: str, body: bytes) -> None:
    with pytest.raises(WireError):
        decode_response(kind, body)


def test_a_request_is_read_back_and_an_image_that_is_none_is_named() -> None:
    body = encode_request({"a": "ü"}, "b")
    assert decode_response('multipart/form-data; boundary="b"', body).fields == {"a": "ü"}
    with pytest.raises(WireError, match="image"):
        encode_image(b"no image")
    assert parse_urls("http://a/,http://b") == ["http://a", "http://b"]
    assert RemoteGymConfig().pause(1, lambda: 0.0) > 0


async def test_pictures_without_a_place_follow_the_text() -> None:
    async def store_image(picture: EncodedImage) -> Image:
        return Image(object="h")

    one = EncodedImage(data=b"", width=2, height=1)
    assert await insert_images("a", [one], None, "<image>") == "a[image, 2x1]"
    parts = await insert_images("a<image>b<image>c", [one], store_image, "<image>")
    assert parts == (Text(text="a"), Image(object="h", width=2, height=1), Text(text="b<image>c"))
