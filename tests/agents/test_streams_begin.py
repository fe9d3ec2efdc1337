"""A streamed answer begins when it is there: until then a broken connection is one that clients repeat."""

from __future__ import annotations

import anyio
import httpx
import pytest

from fleetbus_workers.environment.adapters.agent import answers
from fleetbus_workers.environment.adapters.agent.dialects.base import InvalidCall
from tests.agents.endpoint_support import ANSWER, BODIES, CHAT, each_dialect, find_address, serving
from tests.support.processes import until


@each_dialect
async def test_a_stream_whose_session_moves_before_it_begins_is_told_to_come_again(path: str) -> None:
    async with serving() as (client, session), anyio.create_task_group() as group:
        responses: list[httpx.Response] = []

        async def post() -> None:
            responses.append(await client.post(find_address(path, True), json=BODIES[path] | {"stream": True}))

        group.start_soon(post)
        await session.next_call()
        session.move()
        await until(lambda: bool(responses))
        assert (responses[0].status_code, responses[0].headers["retry-after"]) == (503, "1")


async def test_nothing_of_a_stream_is_sent_before_its_answer_is_there() -> None:
    async with serving() as (client, session), anyio.create_task_group() as group:
        begun = anyio.Event()

        async def post() -> None:
            async with client.stream("POST", CHAT, json=BODIES[CHAT] | {"stream": True}) as response:
                begun.set()
                assert response.status_code == 200 and "Looking." in (await response.aread()).decode()

        group.start_soon(post)
        pending = await session.next_call()
        with anyio.move_on_after(0.3):
            await begun.wait()
        assert not begun.is_set()
        pending.set_answer(ANSWER)
        await begun.wait()


async def test_a_stream_begins_before_its_client_takes_the_server_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(answers, "KEEPALIVE_SECONDS", 0.1)
    async with serving() as (client, session), anyio.create_task_group() as group:
        begun = anyio.Event()

        async def post() -> None:
            async with client.stream("POST", CHAT, json=BODIES[CHAT] | {"stream": True}) as response:
                begun.set()
                assert response.status_code == 200 and "too long" in (await response.aread()).decode()

        group.start_soon(post)
        pending = await session.next_call()
        await begun.wait()
        pending.set_answer(InvalidCall("too long"))


async def test_who_goes_away_before_a_stream_begins_waits_no_longer() -> None:
    async with serving() as (client, session):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.post(CHAT, json=BODIES[CHAT] | {"stream": True}))
            pending = await session.next_call()
            assert pending.connected == 1
            group.cancel_scope.cancel()
        await until(lambda: not pending.connected)
        assert pending.is_lost
        pending.set_answer(ANSWER)
        await until(lambda: not session.requests)
