"""An environment worker's key hosts sessions and answers their calls with what is no answer to them: the gateway serves others
on, and asks others' workers."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.client.sessions import sessions
from fleetbus_schemas import Heartbeat, SessionAnswer, SessionCall, SessionClaimed, SessionRecorded, decode, encode
from fleetbus_workers.gateway.gym_methods import build_task
from tests.support.backends import asyncio_alone
from tests.support.paying import PayingEnvironment, gym_gateway, paying_configuration
from tests.support.small_deployment import SmallDeployment, small_deployment

anyio_backend = asyncio_alone

TASK = {"rewards": [], "verdict": 1.0}


async def beat(fleet: SmallDeployment) -> None:
    said = Heartbeat(role="environment", worker="bad", session_slots=8)
    while True:
        await fleet.bus.broadcast(fleet.subjects.heartbeat("environment", "bad"), encode(said))
        await anyio.sleep(0.2)


async def answer_badly(fleet: SmallDeployment, closing: anyio.Event) -> None:
    """Sessions are opened, and their ends are answered with no message."""
    async with fleet.bus.serve(fleet.subjects.rpc("bad", "*")) as server:
        while True:
            request = await server.receive()
            call = decode(SessionCall, request.payload)
            answer = encode(SessionAnswer(session=call.session, key=call.key, number=0, worker="bad"))
            await request.respond(b"\xff" if call.call == "close" else answer)
            if call.call == "close":
                closing.set()


async def test_an_answer_that_is_none_to_the_close_of_an_idle_session_ends_no_gateway() -> None:
    closing = anyio.Event()
    with anyio.fail_after(120):
        async with small_deployment(paying_configuration()) as fleet, gym_gateway(fleet, session_timeout=0.5) as wire:
            async with anyio.create_task_group() as group:
                group.start_soon(answer_badly, fleet, closing)
                group.start_soon(beat, fleet)
                await wire.connect(TASK, seed=None)
                await closing.wait()
                await anyio.sleep(0.5)
                group.cancel_scope.cancel()
            fleet.environment("e1", make=PayingEnvironment)
            with anyio.fail_after(60):
                session = (await wire.connect(TASK))["session_id"]
                assert await wire.call(session, "close") == {"closed": True}


@pytest.mark.integration
async def test_an_answer_in_the_name_of_another_session_leads_no_calls_of_that_one_astray() -> None:
    """In the journal of that session nothing would tell of it."""
    task, led = build_task(TASK), SessionAnswer(session="other", key="k", number=0, worker="bad")
    with anyio.fail_after(120):
        async with small_deployment(paying_configuration()) as fleet, sessions(fleet.bus, fleet.subjects) as client:
            await fleet.heard(fleet.environment("e1", make=PayingEnvironment))
            await client.call(SessionCall(session="other", call="open", key="o", task=task), timeout=30)

            async def lead_astray() -> None:
                async with fleet.bus.serve(fleet.subjects.rpc("bad", "*")) as server:
                    while True:
                        await (await server.receive()).respond(encode(led))

            async with anyio.create_task_group() as group:
                group.start_soon(lead_astray)
                group.start_soon(beat, fleet)
                await fleet.until(lambda: "bad" in fleet.beats)
                for number in range(4):
                    call = SessionCall(session=f"s{number}", call="open", key="k", task=task)
                    assert (await client.call(call, timeout=30)).worker == "e1"
                reset = SessionCall(session="other", call="reset", key="r")
                assert (await client.call(reset, timeout=30)).messages
                group.cancel_scope.cancel()


async def test_a_stored_answer_in_the_name_of_another_call_makes_no_good_worker_be_taken_for_gone() -> None:
    """It was refused for what it repeated, by every call again, and other sessions found no worker until its next heartbeat."""
    task = build_task(TASK)
    call = SessionCall(session="s", call="step", key="k", text="t", number=0)
    other = SessionAnswer(session="other", key="o", number=0, worker="bad")
    with anyio.fail_after(120):
        async with small_deployment(paying_configuration()) as fleet, sessions(fleet.bus, fleet.subjects) as client:
            await fleet.heard(fleet.environment("e1", make=PayingEnvironment))
            for entry in (
                SessionClaimed(session="s", attempt=1, worker="bad", nonce="n", task=task),
                SessionRecorded(session="s", call=call, answer=other, seconds=0.0),
            ):
                await fleet.bus.publish(fleet.subjects.session("s"), encode(entry))
            answer = await client.call(call, timeout=10)
    assert (answer.session, answer.key, answer.refusal) == ("s", "k", "")
