"""Step-wise sessions of a host in the process of its client, on virtual time: asked directly, as recorded as any other."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.client.sessions import SessionUnavailable
from fleetbus_schemas import MalformedMessage, SessionCall
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.support.deployment_member import Member
from tests.support.stepwise_fixtures import TASK, SessionFixture, World, read_text, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def start_local(here: SessionFixture, name: str, world: World) -> Member:
    """A worker that the fixture's client asks directly; its calls over the bus would fail the test."""
    hosting = anyio.Event()

    def use(host: Any) -> None:
        async def never(*_: Any) -> None:
            pytest.fail("a call to a host of this process went over the bus")

        host._handle = never
        here.client.add_local_host(name, host.call)
        hosting.set()

    member = here.fleet.environment(name, make=world, on_hosting=use)
    await hosting.wait()
    return member


async def test_calls_are_answered_without_the_bus_and_recorded_all_the_same() -> None:
    world = World()
    async with session_fixture() as here:
        await start_local(here, "e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            answer = await here.ask(call)
            assert read_text(answer) == "1: one"
            assert await here.ask(call) == answer, "a repetition is answered from the journal"
        journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, session.name)
        assert [record.call.call for record in journal.records] == ["open", "reset", "step"]
        assert journal.ended is not None
    assert world.steps == ["one"]
    assert world.opened == world.closed == 1


async def test_a_call_runs_to_its_end_though_its_caller_gave_up() -> None:
    world = World(step_seconds=2)
    async with session_fixture() as here:
        await start_local(here, "e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            with pytest.raises(SessionUnavailable):
                await here.client.call(call, timeout=0.5)
            assert read_text(await here.ask(call)) == "1: one", "its repetition joins it"
    assert world.steps == ["one"]
    assert world.most_at_once == 1


async def test_another_worker_goes_on_when_the_host_of_this_process_is_gone() -> None:
    first, second = World(), World()
    async with session_fixture() as here:
        member = await start_local(here, "e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            assert read_text(await session.step("one")) == "1: one"
            here.worker("e2", second)
            member.drain.set()
            await member.ended.wait()
            assert read_text(await session.step("two")) == "2: two"
    assert (first.steps, second.steps) == (["one"], ["one", "two"])
    assert first.opened == first.closed


async def test_what_cannot_be_encoded_is_refused_before_it_is_executed() -> None:
    world = World()
    async with session_fixture() as here:
        await start_local(here, "e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            with pytest.raises(MalformedMessage):
                await session.step("\ud800")
            assert read_text(await session.step("one")) == "1: one"
    assert world.steps == ["one"]


async def test_nothing_is_shared_with_the_caller() -> None:
    world = World()
    config = {"list": [1]}
    task = type(TASK)(key="count", prompt="Count.", config=config)
    async with session_fixture() as here:
        await start_local(here, "e1", world)
        async with here.client.open(task) as session:
            config["list"].append(2)
            journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, session.name)
            assert journal.claim is not None
            assert journal.claim.task.config == {"list": [1]}


async def test_a_call_that_waits_when_its_host_ends_goes_on_elsewhere() -> None:
    first, second = World(step_seconds=1000), World()
    async with session_fixture() as here:
        member = await start_local(here, "e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            here.worker("e2", second)
            async with anyio.create_task_group() as group:
                answers = []

                async def step() -> None:
                    answers.append(await session.step("one"))

                group.start_soon(step)
                await anyio.sleep(1)
                member.kill()
            assert read_text(answers[0]) == "1: one"
    assert second.steps == ["one"]
