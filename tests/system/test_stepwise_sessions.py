"""Step-wise sessions on virtual time: each call executed once, whatever is repeated, lost, slow, or dies."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from fleetbus.audit import audit_run
from fleetbus.client.sessions import Session, SessionFailed, SessionUnavailable, sessions
from schemas import MAX_MESSAGE_BYTES, SessionAnswer, SessionCall, decode, encode
from tests.support.small_fleet import SmallFleet
from tests.support.stepwise_ground import TASK, World, ground, said
from workers.environment.stepwise.journal import journal_of


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_a_session_opens_resets_steps_verifies_and_closes() -> None:
    world = World()
    async with ground() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            assert said(await session.reset(seed=7)) == "start 7"
            answer = await session.step("one")
            assert (said(answer), answer.reward, answer.terminated) == ("1: one", 1.0, False)
            assert await session.state() == {"count": 1}
            verdict = await session.verify()
            assert (verdict.reward, verdict.reason) == (1.0, "counted")
        await here.empty(worker)
        assert world.opened == world.closed
        report = await audit_run(here.fleet.bus, here.fleet.subjects)
        assert report.balanced


async def test_a_repeated_call_gets_the_stored_answer_and_is_executed_once() -> None:
    world = World()
    async with ground() as here:
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
    async with ground() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            with anyio.move_on_after(1):  # a client whose time-out is shorter than the step
                await here.ask(call)
            assert said(await here.ask(call)) == "1: one"
        assert (world.steps, world.most_at_once) == (["one"], 1)


async def test_different_calls_of_one_session_never_overlap() -> None:
    world = World(step_seconds=1)
    async with ground() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            async with anyio.create_task_group() as group:
                for index in range(4):
                    group.start_soon(here.ask, SessionCall(session=session.name, call="step", key=f"k{index}", text="x"))
        assert (len(world.steps), world.most_at_once) == (4, 1)


async def test_a_session_goes_on_at_another_worker_when_its_own_is_killed() -> None:
    first, second = World(), World()
    async with ground() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            assert said(await session.reset(seed=3)) == "start 3"
            assert said(await session.step("one")) == "1: one"
            here.worker("e2", second)
            dying.kill()
            assert said(await session.step("two")) == "2: two"
            assert said(await session.step("three")) == "3: three"
        assert (first.steps, second.steps) == (["one"], ["one", "two", "three"])


async def test_an_answer_that_was_lost_with_its_worker_comes_from_the_journal() -> None:
    first, second = World(), World()
    async with ground() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            call = SessionCall(session=session.name, call="step", key="k", text="one")
            answer = await here.ask(call)
            here.worker("e2", second)
            dying.kill()
            assert await here.ask(call) == answer
            assert second.steps == [], "nothing is done again for what is written down"


async def test_a_session_of_an_environment_that_cannot_be_replayed_ends_as_lost() -> None:
    first, second = World(replayable=False), World(replayable=False)
    async with ground() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.step("one")
            here.worker("e2", second)
            dying.kill()
            with pytest.raises(SessionFailed, match="closed") as failed:
                await session.step("two")
            assert (failed.value.answer.end, failed.value.answer.error_class) == ("lost", "not_replayable")
        assert second.steps == []


async def test_a_restored_session_that_shows_something_else_ends_as_diverged() -> None:
    first, second = World(), World()
    second.drift = 1
    async with ground() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.step("one")
            here.worker("e2", second)
            dying.kill()
            with pytest.raises(SessionFailed) as failed:
                await session.step("two")
            assert failed.value.answer.error_class == "diverged"


async def test_a_worker_that_was_cut_off_cannot_answer_for_a_session_that_moved() -> None:
    first, second = World(step_seconds=10), World()
    async with ground() as here:
        late = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            here.worker("e2", second)
            async with anyio.create_task_group() as group:
                group.start_soon(session.step, "one")
                await first.stepping.wait()
                late.cut()
            late.mend()
            assert said(await session.step("two")) == "2: two"
            journal = await journal_of(here.fleet.bus, here.fleet.subjects, session.name)
            assert [record.call.text for record in journal.records if record.call.call == "step"] == ["one", "two"]
            await here.empty(late)
            assert first.opened == first.closed, "whoever lost its claim closes its environment"


@pytest.mark.parametrize("replayable", [True, False])
async def test_another_client_finds_a_session_where_it_is_and_takes_it_from_nobody(replayable: bool) -> None:
    world = World(replayable=replayable)
    async with ground() as here:
        workers = [here.worker(name, world) for name in ("e1", "e2", "e3")]
        names = [f"s{index}" for index in range(6)]
        for name in names:
            await here.ask(SessionCall(session=name, call="open", key="o", task=TASK))
            await here.ask(SessionCall(session=name, call="reset", key="r"))
            await here.ask(SessionCall(session=name, call="step", key="1", text="one"))
        async with sessions(here.fleet.bus, here.fleet.subjects) as other:  # a gateway that was started again
            await anyio.sleep(5)
            for name in reversed(names):
                answer = await other.call(SessionCall(session=name, call="step", key="2", text="two"), timeout=60)
                assert (answer.end, said(answer)) == (None, "2: two")
                await other.call(SessionCall(session=name, call="close", key="c"), timeout=60)
        await here.empty(*workers)
    assert world.steps == ["one"] * len(names) + ["two"] * len(names)
    assert world.opened == world.closed == len(names)


async def test_a_worker_says_which_sessions_it_holds() -> None:
    async with ground() as here:
        worker = here.worker("e1", World())
        async with here.client.open(TASK, session="held") as session:
            await session.reset()
            assert (await here.fleet.control(worker, "ping")).busy_with == ("held",)
        assert (await here.fleet.control(worker, "ping")).busy_with == ()


async def test_who_finds_no_slot_waits_for_one() -> None:
    world = World()
    async with ground(slots=1) as here:
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
    async with ground(slots=1) as here:
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
    async with ground(slots=1) as here:
        here.worker("e1", World())
        async with here.client.open(TASK):
            with pytest.raises(SessionUnavailable, match="all 1 slots of e1 are taken"):
                async with here.client.open(TASK, timeout=10):
                    raise AssertionError("there is no slot")


async def test_idle_sessions_end_and_a_running_step_is_not_idle() -> None:
    world = World(step_seconds=50)
    async with ground(idle=20, step=100, episode=1000) as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            assert said(await session.step("slow")) == "1: slow"
            await anyio.sleep(10)
            assert said(await session.step("again")) == "2: again"
            await anyio.sleep(30)
            with pytest.raises(SessionFailed) as failed:
                await session.step("late")
            assert (failed.value.answer.refusal, failed.value.answer.end) == ("closed", "idle")
        await here.empty(worker)
        assert world.opened == world.closed


async def test_a_session_that_lasts_too_long_ends() -> None:
    async with ground(episode=60, idle=50) as here:
        here.worker("e1", World())
        async with here.client.open(TASK) as session:
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                while True:
                    await anyio.sleep(25)
                    await session.state()
            assert failed.value.answer.end == "total"


async def test_an_environment_that_raises_ends_its_session_once_and_for_all() -> None:
    world = World()
    world.error = RuntimeError("the simulator is gone")
    async with ground() as here:
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


async def test_a_step_that_takes_too_long_ends_its_session() -> None:
    world = World(step_seconds=1000)
    async with ground() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                await session.step("slow")
            assert (failed.value.answer.end, failed.value.answer.error_class) == ("timeout", "step_timeout")


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
    async with ground() as here:
        here.worker("e1", World())
        async with here.client.open(TASK, session="s") as session:
            assert (await here.ask(call)).refusal == refusal
            assert said(await session.reset()) == "start 0"


async def test_after_the_end_of_an_episode_a_reset_begins_another() -> None:
    world = World()
    async with ground() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset(seed=1)
            while not (await session.step("x")).terminated:
                pass
            with pytest.raises(SessionFailed, match="the episode is over"):
                await session.step("x")
            assert said(await session.reset(seed=2)) == "start 2"
            assert said(await session.step("y")) == "1: y"


async def test_closing_twice_is_harmless_and_nothing_else_is_possible_afterwards() -> None:
    async with ground() as here:
        worker = here.worker("e1", World())
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.close()
            await session.close()
            assert (await here.ask(SessionCall(session=session.name, call="state", key="x"))).refusal == "closed"
        await here.empty(worker)


async def test_a_draining_worker_hands_its_sessions_over() -> None:
    first, second = World(), World()
    async with ground(drain=5) as here:
        leaving = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.step("one")
            here.worker("e2", second)
            leaving.drain.set()
            await leaving.ended.wait()
            assert said(await session.step("two")) == "2: two"
        assert first.opened == first.closed


async def test_a_session_whose_worker_and_client_are_gone_gets_a_tombstone_and_one_that_lives_does_not() -> None:
    async with ground(idle=100, episode=10_000) as here:
        dying = here.worker("e1", World())
        gone = here.client.session("gone", timeout=60)
        await gone.make("open", task=TASK)
        await gone.reset()
        here.worker("e2", World())
        dying.kill()
        async with here.client.open(TASK, session="lives") as lives:
            await lives.reset()
            for _ in range(5):
                await anyio.sleep(60)
                await lives.state()
            journal = await journal_of(here.fleet.bus, here.fleet.subjects, "gone")
            assert journal.ended is not None and journal.ended.end == "orphaned"
            assert (await journal_of(here.fleet.bus, here.fleet.subjects, "lives")).ended is None
        assert (await here.ask(SessionCall(session="gone", call="state", key="late"))).end == "orphaned"


async def test_what_is_too_large_for_the_log_ends_its_session_and_nobody_elses() -> None:
    world = World()
    async with ground() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as other, here.client.open(TASK) as session:
            await other.reset()
            await session.reset()
            with pytest.raises(SessionFailed) as failed:
                await session.step("x" * (MAX_MESSAGE_BYTES - 200))
            assert (failed.value.answer.end, failed.value.answer.error_class) == ("env_failed", "too_large")
            assert said(await other.step("one")) == "1: one"
        await here.empty(worker)
        assert world.opened == world.closed


async def test_a_call_made_while_the_server_is_away_is_answered_when_it_is_back() -> None:
    world = World()
    async with ground() as here:
        here.worker("e1", world)
        async with here.client.open(TASK) as session:
            await session.reset()
            await use_restart(here.fleet)
            assert said(await session.step("one")) == "1: one"
        assert world.steps == ["one"]


async def use_restart(fleet: SmallFleet) -> None:
    """Every connection is cut and comes back."""
    for member in fleet.members.values():
        member.cut()
    await anyio.sleep(1)
    for member in fleet.members.values():
        member.mend()


def test_sessions_are_named_by_whoever_opens_them() -> None:
    assert Session(None, "mine", timeout=1.0).name == "mine"  # type: ignore[arg-type]
