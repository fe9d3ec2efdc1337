"""Core messages on the bus: calls and their answers, and broadcasts that may be dropped."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.errors import NoResponders, PublishUnanswered, RequestUnanswered
from tests.support.servers import FORM

ONE_SERVER = pytest.mark.skipif(FORM == "cluster", reason="the client goes on with another server, or asks there too early")


@ONE_SERVER
async def test_a_request_gets_the_answer_of_who_serves(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")

    async def serve(server: Any) -> None:
        while True:
            request = await server.receive()
            assert request.subject == subject
            await request.respond(request.payload[::-1])

    async with world.connect() as one, world.connect() as other, one.serve(subject) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, server)
            assert await other.request(subject, b"abc", timeout=30) == b"cba"
            assert await one.request(subject, b"xyz", timeout=30) == b"zyx"
            tasks.cancel_scope.cancel()


async def test_answers_find_their_callers_in_any_order(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")
    answers: dict[int, bytes] = {}

    async def call(bus: Any, number: int) -> None:
        answers[number] = await bus.request(subject, b"%d" % number, timeout=30)

    async with world.connect() as one, world.connect() as other, one.serve(subject) as server:
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(call, other, number)
            requests = [await server.receive() for _ in range(50)]
            for request in reversed(requests):
                await request.respond(b"answer " + request.payload)
    assert answers == {number: b"answer %d" % number for number in range(50)}


async def test_nobody_there_is_known_at_once(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")
    async with world.connect() as bus:
        with anyio.fail_after(20), pytest.raises(NoResponders, match="fbrpc"):
            await bus.request(subject, b"x", timeout=30)
        async with bus.serve(subject):
            pass
        with anyio.fail_after(20), pytest.raises(NoResponders):
            await bus.request(subject, b"x", timeout=30)


@ONE_SERVER
async def test_whoever_serves_is_found_as_soon_as_it_says_so(world: Any) -> None:
    async with world.connect() as one, world.connect() as other:
        for number in range(100):
            subject = world.subjects.rpc("w", f"s{number}")
            async with one.serve(subject) as server, anyio.create_task_group() as tasks:
                tasks.start_soon(_answer_once, server)
                assert await other.request(subject, b"x", timeout=30) == b"x"


async def _answer_once(server: Any) -> None:
    request = await server.receive()
    await request.respond(request.payload)


async def _answer_all(server: Any) -> None:
    while True:
        await _answer_once(server)


async def test_silence_is_not_nobody(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")
    async with world.connect() as bus, bus.serve(subject):
        started_at = anyio.current_time()
        with anyio.fail_after(20), pytest.raises(RequestUnanswered):
            await bus.request(subject, b"x", timeout=0.2)
        assert anyio.current_time() - started_at > 0.15


@pytest.mark.integration
async def test_requests_beyond_the_limit_are_answered_by_nobody(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")
    outcomes: list[bool] = []

    async def call(bus: Any) -> None:
        try:
            await bus.request(subject, b"x", timeout=2.0)
        except RequestUnanswered:
            outcomes.append(False)
        else:
            outcomes.append(True)

    async with world.connect() as bus, bus.serve(subject, limit=2) as server:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call, bus)
            async with bus.serve(world.subjects.rpc("w", "later")):  # by now all five have arrived
                pass
            for _ in range(2):
                await _answer_once(server)
    assert sorted(outcomes) == [False, False, False, True, True]


@ONE_SERVER
async def test_a_listener_hears_broadcasts_that_match(world: Any) -> None:
    async with world.connect() as one, world.connect() as other, one.listen(world.subjects.heartbeats) as listener:
        await other.broadcast(world.subjects.rpc("w", "s"), b"not this")
        await other.broadcast(world.subjects.heartbeat("environment", "w1"), b"1")
        await other.broadcast(world.subjects.heartbeat("learner", "w2"), b"2")
        with anyio.fail_after(30):
            heard = [await listener.receive(), await listener.receive()]
    assert heard == [
        (world.subjects.heartbeat("environment", "w1"), b"1"),
        (world.subjects.heartbeat("learner", "w2"), b"2"),
    ]


async def test_a_listener_drops_the_oldest_and_counts(world: Any) -> None:
    subject = world.subjects.heartbeat("environment", "w1")
    async with world.connect() as bus, bus.listen(subject, limit=3) as listener:
        for number in range(10):
            await bus.broadcast(subject, b"%d" % number)
        async with bus.serve(world.subjects.rpc("w", "later")):  # by now all ten have arrived
            pass
        with anyio.fail_after(30):
            heard = [(await listener.receive())[1] for _ in range(3)]
        assert (heard, listener.dropped) == ([b"7", b"8", b"9"], 7)


async def test_a_broadcast_that_nobody_hears_is_no_error(world: Any) -> None:
    async with world.connect() as bus:
        await bus.broadcast(world.subjects.heartbeat("environment", "w1"), b"1")


async def test_listening_and_serving_survive_a_break(world: Any) -> None:
    heartbeat, call = world.subjects.heartbeat("environment", "w1"), world.subjects.rpc("w", "s")
    async with (
        world.connect() as steady,
        world.connect_by_line() as (bus, line),
        bus.listen(heartbeat) as listener,
        bus.serve(call) as server,
    ):
        await line.cut()
        await bus.broadcast(heartbeat, b"lost")
        await line.mend()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_answer_all, server)
                while True:
                    try:
                        assert await steady.request(call, b"x", timeout=0.3) == b"x"
                        break
                    except (NoResponders, RequestUnanswered):
                        await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await steady.broadcast(heartbeat, b"heard")
            assert await listener.receive() == (heartbeat, b"heard")


@pytest.mark.integration
@ONE_SERVER
async def test_a_request_made_while_cut_off_is_sent_when_the_line_is_back(world: Any) -> None:
    subject = world.subjects.rpc("w", "s")
    async with world.ready() as steady, steady.serve(subject) as server, world.connect_by_line() as (bus, line):
        await line.cut()
        with anyio.fail_after(30), pytest.raises(PublishUnanswered):  # now the client knows that it is cut off
            await bus.publish(world.subjects.episode("e1"), b"x", timeout=0.2)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_answer_once, server)
                tasks.start_soon(line.mend)
                assert await bus.request(subject, b"x", timeout=30) == b"x"
        await line.cut()
        with anyio.fail_after(30), pytest.raises(RequestUnanswered):
            await bus.request(subject, b"x", timeout=0.3)
