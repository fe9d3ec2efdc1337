"""Step-wise sessions on virtual time that go from worker to worker: killed, cut off, drained, or left by everybody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from fleetbus.client.contexts import PolicyContexts
from fleetbus.client.sessions import SessionFailed, sessions
from fleetbus_schemas import MAX_MESSAGE_BYTES, ContextChange, SessionAnswer, SessionCall, Task, decode, encode
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.environment.stepwise.orphan_sweep import MARGIN_SECONDS
from tests.support.stepwise_fixtures import TASK, CountingEnvironment, World, read_text, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def test_a_session_goes_on_at_another_worker_when_its_own_is_killed() -> None:
    first, second = World(), World()
    async with session_fixture() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            assert read_text(await session.reset(seed=3)) == "start 3"
            assert read_text(await session.step("one")) == "1: one"
            here.worker("e2", second)
            dying.kill()
            assert read_text(await session.step("two")) == "2: two"
            assert read_text(await session.step("three")) == "3: three"
        assert (first.steps, second.steps) == (["one"], ["one", "two", "three"])


async def test_contexts_go_on_as_they_were_at_another_worker() -> None:
    first, second, told = World(), World(), ContextChange(keep_turns=1)
    first.changes = second.changes = {2: told, 5: told}
    async with session_fixture() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            contexts = PolicyContexts((await session.reset()).messages)
            for text in ("one", "two", "three", "four", "five"):
                answer = await session.step(text)
                contexts.extend(text, answer)
                if text == "two":
                    assert answer.context == told
                    here.worker("e2", second)
                    dying.kill()
        assert answer.terminated and answer.context is None, "nothing goes on after the end"
    texts = [[str(message.content) for message in segment.messages] for segment in contexts.segments]
    assert texts[0] == ["start 0", "one", "1: one", "two"]
    assert texts[1] == ["start 0", "two", "2: two", "three", "3: three", "four", "4: four", "five", "5: five"]


async def test_calls_that_come_while_a_session_is_restored_wait_until_it_is() -> None:
    first, second = World(), World(step_seconds=0.5)
    async with session_fixture() as here:
        dying = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            for text in ("one", "two", "three"):
                await session.step(text)
            here.worker("e2", second)
            dying.kill()
            answers: list[Any] = []

            async def ask(call: Any) -> None:
                answers.append(await here.ask(SessionCall(session=session.name, call=call, key=call)))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, "verify")  # takes the session over, and the next one finds it
                await second.stepping.wait()
                group.start_soon(ask, "step")
            assert second.steps == ["one", "two", "three", ""], "what was recorded comes first"
            assert second.most_at_once == 1
            for answer in answers:
                if answer.unpaid is not None:
                    assert (answer.reward, answer.unpaid) in ((3.0, 0.0), (4.0, 0.0)), "every step was rewarded"


async def test_an_answer_that_was_lost_with_its_worker_comes_from_the_journal() -> None:
    first, second = World(), World()
    async with session_fixture() as here:
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
    async with session_fixture() as here:
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
    async with session_fixture() as here:
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
    async with session_fixture() as here:
        late = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            here.worker("e2", second)
            async with anyio.create_task_group() as group:
                group.start_soon(session.step, "one")
                await first.stepping.wait()
                late.cut()
            late.mend()
            assert read_text(await session.step("two")) == "2: two"
            journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, session.name)
            assert [record.call.text for record in journal.records if record.call.call == "step"] == ["one", "two"]
            await here.empty(late)
            assert first.opened == first.closed, "whoever lost its claim closes its environment"


@pytest.mark.parametrize("replayable", [True, False])
async def test_another_client_finds_a_session_where_it_is_and_takes_it_from_nobody(replayable: bool) -> None:
    world = World(replayable=replayable)
    async with session_fixture() as here:
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
                assert (answer.end, read_text(answer)) == (None, "2: two")
                await other.call(SessionCall(session=name, call="close", key="c"), timeout=60)
        await here.empty(*workers)
    assert world.steps == ["one"] * len(names) + ["two"] * len(names)
    assert world.opened == world.closed == len(names)


async def test_a_worker_says_which_sessions_it_holds() -> None:
    async with session_fixture() as here:
        worker = here.worker("e1", World())
        async with here.client.open(TASK, session="held") as session:
            await session.reset()
            assert (await here.fleet.control(worker, "ping")).busy_with == ("held",)
        assert (await here.fleet.control(worker, "ping")).busy_with == ()


async def test_a_draining_worker_hands_its_sessions_over() -> None:
    first, second = World(), World()
    async with session_fixture(drain=5) as here:
        leaving = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            await session.step("one")
            here.worker("e2", second)
            leaving.drain.set()
            await leaving.ended.wait()
            assert read_text(await session.step("two")) == "2: two"
        assert first.opened == first.closed


async def test_a_session_that_is_handed_over_in_the_midst_of_a_call_goes_on_whatever_became_of_that_call() -> None:
    """Its environment is closed under it, so what it fails with says nothing about the session."""
    first, second = World(step_seconds=5, close_seconds=4), World()
    first.error = RuntimeError("closed")
    async with session_fixture(drain=3, close=10) as here:
        leaving = here.worker("e1", first)
        async with here.client.open(TASK) as session:
            await session.reset()
            await here.fleet.heard(here.worker("e2", second))
            async with anyio.create_task_group() as group:
                group.start_soon(here.fleet.drain_members, [leaving])
                answer = await session.step("one")
        assert (answer.worker, read_text(answer)) == ("e2", "1: one")


async def test_a_session_whose_worker_and_client_are_gone_gets_a_tombstone_and_one_that_lives_does_not() -> None:
    async with session_fixture(idle=100, episode=10_000) as here:
        dying = here.worker("e1", World())
        gone = here.client.session("gone", timeout=60)
        await gone.request("open", task=TASK)
        await gone.reset()
        here.worker("e2", World())
        dying.kill()
        async with here.client.open(TASK, session="lives") as lives:
            await lives.reset()
            for _ in range(5):
                await anyio.sleep(60)
                await lives.state()
            journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, "gone")
            assert journal.ended is not None and journal.ended.end == "orphaned"
            assert (await read_session_journal(here.fleet.bus, here.fleet.subjects, "lives")).ended is None
        assert (await here.ask(SessionCall(session="gone", call="state", key="late"))).end == "orphaned"


class Holding(CountingEnvironment):
    """Holds something elsewhere, which its world knows by name."""

    def __init__(self, world: World, elsewhere: set[str], names: Iterator[str]) -> None:
        super().__init__(world)
        self._elsewhere = elsewhere
        self._names = names
        self.held = ""

    async def open(self, task: Task) -> None:
        await super().open(task)
        self.held = next(self._names)
        self._elsewhere.add(self.held)

    async def release(self, task: Task, held: str) -> None:
        await anyio.lowlevel.checkpoint()
        self._elsewhere.discard(held)

    async def close(self) -> None:
        await super().close()
        self._elsewhere.discard(self.held)


@pytest.mark.integration
@pytest.mark.parametrize("comes_back", [True, False])
async def test_what_a_dead_worker_held_elsewhere_is_released_whether_its_client_comes_back_or_not(comes_back: bool) -> None:
    world, elsewhere, names = World(replayable=False), set[str](), map(str, itertools.count())
    async with session_fixture() as here:
        dying = here.fleet.environment("e1", make=lambda: Holding(world, elsewhere, names))
        session = here.client.session()
        await session.request("open", task=TASK)
        await session.reset()
        await session.step("one")
        assert elsewhere == {"0"}
        dying.kill()
        await dying.ended.wait()
        elsewhere.add("0")  # a process that is killed closes nothing
        here.fleet.environment("e2", make=lambda: Holding(world, elsewhere, names))
        if comes_back:
            with pytest.raises(SessionFailed, match="lost"):
                await session.step("two")
        else:
            limits = here.fleet.configuration.limits
            await anyio.sleep(2 * (limits.idle + limits.step + MARGIN_SECONDS))
        assert elsewhere == set()


async def test_an_answer_too_large_of_a_session_that_has_moved_meanwhile_ends_no_worker() -> None:
    world = World(step_seconds=5.0)
    async with session_fixture() as here:
        for worker, make in (("e1", world), ("e2", World())):
            await here.fleet.heard(here.worker(worker, make))

        async def ask(worker: str, call: SessionCall) -> SessionAnswer:
            answer = await here.fleet.bus.request(here.fleet.subjects.rpc(worker, "s"), encode(call), timeout=60)
            return decode(SessionAnswer, answer)

        late: list[SessionAnswer] = []

        async def step() -> None:
            text = "x" * (MAX_MESSAGE_BYTES - 200)
            late.append(await ask("e1", SessionCall(session="s", call="step", key="k", text=text)))

        await ask("e1", SessionCall(session="s", call="open", key="o", task=TASK))
        await ask("e1", SessionCall(session="s", call="reset", key="r"))
        async with anyio.create_task_group() as group:
            group.start_soon(step)
            await world.stepping.wait()
            assert not (await ask("e2", SessionCall(session="s", call="state", key="moved"))).refusal
        assert [answer.refusal for answer in late] == ["moved"]
        assert (await ask("e1", SessionCall(session="s", call="state", key="moved"))).worker == "e2"
