"""Step-wise sessions on virtual time and their limits: slots, and how long a session rests, lasts or steps."""

from __future__ import annotations

from functools import partial

import anyio
import msgspec
import pytest

from fleetbus.client.sessions import SessionFailed, SessionUnavailable
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import SessionAnswer, SessionCall, decode, encode
from fleetbus_schemas.message import MAX_MESSAGE_BYTES
from tests.support.stepwise_fixtures import TASK, CountingEnvironment, World, read_text, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def test_who_finds_no_slot_waits_for_one() -> None:
    world = World()
    async with session_fixture(slots=1) as here:
        worker = here.worker("e1", world)
        opened: list[str] = []

        async def play(name: str) -> None:
            async with here.client.open(TASK, session=name) as session:
                opened.append(name)
                await session.reset()
                await anyio.sleep(3)
                await session.step(name)

        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(play, f"s{index}")
        assert sorted(opened) == sorted(world.steps) == ["s0", "s1", "s2", "s3"]
        await here.empty(worker)


async def test_calls_that_queue_for_one_session_take_one_slot_also_after_one_of_them_has_given_up() -> None:
    world = World()
    answers: dict[str, SessionAnswer] = {}
    async with session_fixture(slots=1) as here:
        worker = here.worker("e1", world)
        subject = here.fleet.subjects.rpc("e1", "wanted")

        async def ask(name: str, *, after: float, wait_seconds: float) -> None:
            await anyio.sleep(after)
            call = SessionCall(session="wanted", call="open", key="k", task=TASK, wait_seconds=wait_seconds)
            answers[name] = decode(SessionAnswer, await here.fleet.bus.request(subject, encode(call), timeout=200))

        async with here.client.open(TASK) as holder, anyio.create_task_group() as group:
            await holder.reset()
            group.start_soon(partial(ask, "gives up", after=0, wait_seconds=1))
            group.start_soon(partial(ask, "repeats", after=0.5, wait_seconds=60))
            group.start_soon(partial(ask, "repeats again", after=2, wait_seconds=60))
            await anyio.sleep(10)
            await holder.close()
        await here.ask(SessionCall(session="wanted", call="close", key="c"))
        await here.empty(worker)
    refusals = {name: answer.refusal for name, answer in answers.items()}
    assert refusals == {"gives up": "no_slot", "repeats": "", "repeats again": ""}
    assert answers["repeats"] == answers["repeats again"]
    assert world.opened == world.closed == 2


async def test_without_any_slot_in_time_the_caller_is_told() -> None:
    async with session_fixture(slots=1) as here:
        here.worker("e1", World())
        async with here.client.open(TASK):
            with pytest.raises(SessionUnavailable, match="all 1 slots of e1 are taken"):
                async with here.client.open(TASK, timeout=10):
                    raise AssertionError("there is no slot")


async def test_idle_sessions_end_and_a_running_step_is_not_idle() -> None:
    world = World(step_seconds=50)
    async with session_fixture(idle=20, step=100, episode=1000) as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            assert read_text(await session.step("slow")) == "1: slow"
            await anyio.sleep(10)
            assert read_text(await session.step("again")) == "2: again"
            await anyio.sleep(30)
            with pytest.raises(SessionFailed) as failed:
                await session.step("late")
            assert (failed.value.answer.refusal, failed.value.answer.end) == ("closed", "idle")
        await here.empty(worker)
        assert world.opened == world.closed


async def test_a_session_that_lasts_too_long_ends() -> None:
    async with session_fixture(episode=60, idle=50) as here:
        here.worker("e1", World())
        async with here.client.open(TASK) as session:
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                while True:
                    await anyio.sleep(25)
                    await session.state()
            assert failed.value.answer.end == "total"


async def test_a_step_that_takes_too_long_ends_its_session() -> None:
    world = World(step_seconds=1000)
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                await session.step("slow")
            assert (failed.value.answer.end, failed.value.answer.error_class) == ("timeout", "step_timeout")


async def test_a_session_in_a_step_that_paces_itself_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ended while it stepped, once that took longer than any other call may, and a rest."""
    monkeypatch.setattr(CountingEnvironment, "paces_itself", True, raising=False)
    async with session_fixture(step=100, idle=200, episode=3600) as here:
        here.worker("e1", World(step_seconds=3000))
        async with here.client.open(TASK, timeout=4000) as session:
            await session.reset()
            assert read_text(await session.step("slow")) == "1: slow"


async def test_a_step_of_an_environment_that_paces_itself_may_take_as_long_as_its_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CountingEnvironment, "paces_itself", True, raising=False)
    world = World(step_seconds=600)
    async with session_fixture(step=100, episode=1000) as here:
        here.worker("e1", world)
        async with here.client.open(TASK, timeout=2000) as session:
            await session.reset()
            assert read_text(await session.step("slow")) == "1: slow"
            world.step_seconds = 1001
            with pytest.raises(SessionFailed, match="1000"):
                await session.step("too slow")


async def test_a_key_that_leaves_no_room_for_an_answer_ends_neither_worker_nor_session() -> None:
    world = World()
    async with session_fixture() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            for name in (session.name, "unknown"):
                call = SessionCall(session=name, call="close", key="")
                call = msgspec.structs.replace(call, key="k" * (MAX_MESSAGE_BYTES - len(encode(call)) - 8))
                with pytest.raises(RequestUnanswered):
                    await here.fleet.bus.request(here.fleet.subjects.rpc("e1", name), encode(call), timeout=5)
            assert read_text(await session.step("on")) == "1: on"
        await here.empty(worker)
