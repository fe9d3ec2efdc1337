"""Questions to the server's API: what passes is waited for, what will not pass is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

import anyio
import pytest

from fleetbus.bus.nats.api import STREAM_NOT_FOUND, ApiRefused, JetStreamApi
from fleetbus.bus.nats.request_mux import Answer, RequestMux
from fleetbus.bus.streams import API
from fleetbus.errors import BusError, RequestUnanswered
from tests.support.virtual_time import virtual_time

NOBODY: Answer = (b"", b"NATS/1.0 503\r\n\r\n")
INFO: Answer = (b'{"state": {"last_seq": 7}}', None)
NO_QUORUM, OFFLINE = 10008, 10118

anyio_backend = virtual_time


def refusal(code: int) -> Answer:
    return json.dumps({"error": {"code": 503, "err_code": code, "description": "so it is"}}).encode(), None


class Server:
    """Answers what ``answers`` says at that time, in seconds from the beginning of the test."""

    can_send = True

    def __init__(self, answers: Callable[[float], Answer]) -> None:
        self._answers = answers
        self._count = 0
        self._began = anyio.current_time()

    def new_reply(self) -> str:
        self._count += 1
        return str(self._count)

    async def ask(self, reply: str, command: bytes, **options: float) -> Answer:
        await anyio.sleep(0.001)
        return self._answers(anyio.current_time() - self._began)


def api(answers: Callable[[float], Answer]) -> JetStreamApi:
    return JetStreamApi(cast(RequestMux, Server(answers)), API)


@pytest.mark.parametrize("trouble", [refusal(NO_QUORUM), refusal(OFFLINE), NOBODY], ids=["no quorum", "offline", "nobody"])
async def test_a_cluster_that_is_away_for_a_while_is_waited_for(trouble: Answer) -> None:
    asked = api(lambda now: trouble if 1 < now < 20 else INFO)
    assert (await asked.ask("STREAM.INFO.fb_r"))["state"]["last_seq"] == 7
    await anyio.sleep(1)
    assert (await asked.ask("STREAM.INFO.fb_r"))["state"]["last_seq"] == 7
    assert anyio.current_time() >= 20


@pytest.mark.parametrize("trouble", [refusal(NO_QUORUM), NOBODY], ids=["no quorum", "nobody"])
async def test_one_that_stays_away_longer_than_the_caller_waits_has_not_answered(trouble: Answer) -> None:
    asked = api(lambda now: trouble if now > 1 else INFO)
    await asked.ask("STREAM.INFO.fb_r")
    await anyio.sleep(1)
    with anyio.fail_after(6), pytest.raises(RequestUnanswered):
        await asked.ask("STREAM.INFO.fb_r", timeout=5)


async def test_a_stream_that_answered_one_question_is_waited_for_with_the_others() -> None:
    asked = api(lambda now: NOBODY if 1 < now < 5 else INFO)
    await asked.ask("STREAM.INFO.fb_r")
    await anyio.sleep(1)
    assert await asked.ask_raw("DIRECT.GET.fb_r.fb.r.task.p.e", b"") == INFO


async def test_a_stream_that_never_answered_is_soon_told_to_be_missing() -> None:
    asked = api(lambda now: NOBODY)
    with anyio.fail_after(2), pytest.raises(BusError, match="it does not exist, or the server runs without JetStream"):
        await asked.ask_raw("DIRECT.GET.fb_r.fb.r.task.p.e", b"")


@pytest.mark.parametrize("code", [10039, 10076])
async def test_jetstream_that_is_off_for_a_while_does_not_count_as_bad_input(code: int) -> None:
    """Status 2 fails a worker that never restarted, for good; a server whose JetStream was turned off may get it back."""
    with pytest.raises(ApiRefused) as refused:
        await api(lambda now: refusal(code)).ask("STREAM.INFO.fb_r")
    assert refused.value.code == code


async def test_what_is_refused_is_told_at_once() -> None:
    asked = api(lambda now: refusal(STREAM_NOT_FOUND))
    with anyio.fail_after(0.1), pytest.raises(ApiRefused):
        await asked.ask("STREAM.INFO.fb_r")


@pytest.mark.parametrize(
    ("trouble", "error"),
    [(refusal(NO_QUORUM), ApiRefused), (NOBODY, RequestUnanswered)],
    ids=["no quorum", "nobody"],
)
async def test_what_must_not_be_done_later_is_asked_once(trouble: Answer, error: type[BusError]) -> None:
    asked = api(lambda now: trouble if now < 1 else INFO)
    with anyio.fail_after(0.5), pytest.raises(error):
        await asked.ask_once("STREAM.PURGE.fb_r", {"seq": 3})
    await anyio.sleep(1)
    await asked.ask_once("STREAM.PURGE.fb_r", {"seq": 3})
