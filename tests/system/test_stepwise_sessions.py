"""Step-wise sessions on virtual time: each call executed once, whatever is repeated, refused, too large, or raises."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.client.sessions import Session, SessionFailed
from fleetbus_schemas import MAX_MESSAGE_BYTES, SessionCall
from fleetbus_workers.environment.base import Start
from tests.support.small_deployment import SmallDeployment
from tests.support.stepwise_fixtures import TASK, CountingEnvironment, World, read_text, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def test_a_session_opens_resets_steps_verifies_and_closes() -> None:
    world = World()
    async with session_fixture() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            assert read_text(await session.reset(seed=7)) == "start 7"
            answer = await session.step("one")
            assert (read_text(answer), answer.reward, answer.terminated) == ("1: one", 1.0, False)
            assert await session.state() == {"count": 1}
            verdict = await session.verify()
            assert (verdict.reward, verdict.reason) == (1.0, "counted")
        await here.empty(worker)
        assert world.opened == world.closed
        report = await audit_run(here.fleet.bus, here.fleet.subjects)
        assert report.balanced


async def test_a_repeated_call_gets_the_stored_answer_and_is_executed_once() -> None:
    world = World()
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            first = await here.ask(call)
            assert await here.ask(call) == first
            other = await here.ask(msgspec.structs.replace(call, text="two"))
            assert other.refusal == "conflict"
        assert world.steps == ["one"]


async def test_a_call_repeated_while_it_runs_joins_it() -> None:
    world = World(step_seconds=4)
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            with anyio.move_on_after(1):  # a client whose time-out is shorter than the step
                await here.ask(call)
            assert read_text(await here.ask(call)) == "1: one"
        assert (world.steps, world.most_at_once) == (["one"], 1)


async def test_a_slot_is_free_only_after_its_environment_is_closed_whatever_is_repeated_meanwhile() -> None:
    world = World(close_seconds=3)
    async with session_fixture(slots=1) as here:
        worker = here.worker("e1", world)
        for name in ("first", "second"):
            await here.ask(SessionCall(session=name, call="open", key="open", task=TASK, wait_seconds=30))
            async with anyio.create_task_group() as group:
                group.start_soon(here.ask, SessionCall(session=name, call="close", key="close"))
                await anyio.sleep(1)
                assert (await here.ask(SessionCall(session=name, call="open", key="open", task=TASK))).end is None
                if name == "first":
                    group.start_soon(
                        here.ask, SessionCall(session="second", call="open", key="open", task=TASK, wait_seconds=30)
                    )
        await here.empty(worker)
        assert (world.opened, world.closed, world.most_open) == (2, 2, 1)


async def test_different_calls_of_one_session_never_overlap() -> None:
    world = World(step_seconds=1)
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            async with anyio.create_task_group() as group:
                for index in range(4):
                    group.start_soon(here.ask, SessionCall(session=session.name, call="step", key=f"k{index}", text="x"))
        assert (len(world.steps), world.most_at_once) == (4, 1)


async def test_an_environment_that_raises_ends_its_session_once_and_for_all() -> None:
    world = World()
    world.error = RuntimeError("the simulator is gone")
    async with session_fixture() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            answer = await here.ask(call)
            assert (answer.end, answer.error_class) == ("env_failed", "RuntimeError")
            world.error = None
            assert await here.ask(call) == answer
        assert world.steps == []
        await here.empty(worker)
        assert world.opened == world.closed


class Seated(CountingEnvironment):
    """Names a seat."""

    async def reset(self) -> Start:
        return msgspec.structs.replace(await super().reset(), seat="first")


class SeatedWorld(World):
    def __call__(self) -> Seated:
        return Seated(self)


async def test_an_environment_with_seats_is_refused_by_name() -> None:
    async with session_fixture() as here:
        here.worker("e1", SeatedWorld())
        async with here.client.open(TASK) as session:
            with pytest.raises(SessionFailed, match="this environment has seats, which a session cannot drive"):
                await session.reset()


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (SessionCall(session="s", call="step", key="x", text="one"), "conflict"),
        (SessionCall(session="s", call="reset", key="x", number=7), "gap"),
        (SessionCall(session="s", call="open", key="x", task=TASK), "conflict"),
        (SessionCall(session="never", call="reset", key="x"), "unknown"),
        (SessionCall(session="never", call="open", key="x"), "conflict"),
    ],
    ids=["step before reset", "gap", "opened twice", "never opened", "no task"],
)
async def test_what_is_out_of_place_is_refused_and_harms_nothing(call: SessionCall, refusal: str) -> None:
    async with session_fixture() as here:
        here.worker("e1", World())
        async with here.client.open(TASK, session="s") as session:
            assert (await here.ask(call)).refusal == refusal
            assert read_text(await session.reset()) == "start 0"


async def test_after_the_end_of_an_episode_a_reset_begins_another() -> None:
    world = World()
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset(seed=1)
            while not (await session.step("x")).terminated:
                pass
            with pytest.raises(SessionFailed, match="the episode is over"):
                await session.step("x")
            assert read_text(await session.reset(seed=2)) == "start 2"
            assert read_text(await session.step("y")) == "1: y"


async def test_closing_twice_is_harmless_and_nothing_else_is_possible_afterwards() -> None:
    async with session_fixture() as here:
        worker = here.worker("e1", World())
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.close()
            await session.close()
            assert (await here.ask(SessionCall(session=session.name, call="state", key="x"))).refusal == "closed"
        await here.empty(worker)


async def test_what_is_too_large_for_the_log_ends_its_session_and_nobody_elses() -> None:
    world = World()
    async with session_fixture() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as other, here.client.open(TASK) as session:
            await other.reset()
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                await session.step("x" * (MAX_MESSAGE_BYTES - 200))
            assert (failed.value.answer.end, failed.value.answer.error_class) == ("env_failed", "too_large")
            assert read_text(await other.step("one")) == "1: one"
        await here.empty(worker)
        assert world.opened == world.closed


async def test_a_call_made_while_the_server_is_away_is_answered_when_it_is_back() -> None:
    world = World()
    async with session_fixture() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            await use_restart(here.fleet)
            assert read_text(await session.step("one")) == "1: one"
        assert world.steps == ["one"]


async def use_restart(fleet: SmallDeployment) -> None:
    """Every connection is cut and comes back."""
    for member in fleet.members.values():
        member.cut()
    await anyio.sleep(1)
    for member in fleet.members.values():
        member.mend()


def test_sessions_are_named_by_whoever_opens_them() -> None:
    assert Session(None, "mine", timeout=1.0).name == "mine"  # type: ignore[arg-type]
