"""Step-wise sessions on virtual time, and what their journals take of a worker's memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus
from fleetbus.client.sessions import Session, SessionFailed, sessions
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import LogFull
from fleetbus.log.actions import LAG_PAUSES_SECONDS
from fleetbus_schemas import SessionAnswer, SessionCall, decode, encode
from fleetbus_workers.environment.stepwise import host, journal_reads
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.support.stepwise_fixtures import TASK, SessionFixture, World, read_text, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

LONG = "x" * 4096


async def ask(here: SessionFixture, worker: str, call: SessionCall) -> SessionAnswer:
    subject = here.fleet.subjects.rpc(worker, call.session)
    return decode(SessionAnswer, await here.fleet.bus.request(subject, encode(call), timeout=200))


async def step_until_the_end(session: Session, most: int) -> SessionAnswer:
    with pytest.raises(SessionFailed) as failed:
        for _ in range(most):
            await session.reset()
            await session.step(LONG)
    return failed.value.answer


async def test_a_session_ends_when_its_journal_has_reached_its_limit_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "JOURNAL_BYTES", 50_000)
    world = World()
    async with session_fixture() as here:
        worker = here.worker("e1", world)
        async with here.client.open(TASK) as long, here.client.open(TASK) as short:
            await short.reset()
            answer = await step_until_the_end(long, 20)
            assert (answer.end, answer.error_class) == ("total", "journal_full")
            repeated = await here.ask(SessionCall(session=long.name, call="step", key=answer.key, text=LONG))
            assert (repeated.end, repeated.error_class, repeated.error) == ("total", "journal_full", answer.error)
            assert read_text(await short.step("on")) == "1: on"
            closed = await here.ask(SessionCall(session=long.name, call="close", key="c"))
            assert (closed.refusal, closed.end) == ("", "total")
        await here.empty(worker)
    assert world.opened == world.closed


async def test_when_all_journals_together_reach_their_limit_a_session_below_its_share_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "JOURNALS_BYTES", 100_000)
    async with session_fixture(slots=4) as here:
        here.worker("e1", World())
        async with here.client.open(TASK) as first, here.client.open(TASK) as second, here.client.open(TASK) as short:
            await short.reset()
            for session in (first, second):
                for _ in range(4):
                    await session.reset()
                    await session.step(LONG)
            ends = {(await step_until_the_end(session, 10)).error_class for session in (first, second)}
            assert ends == {"journal_full"}
            assert read_text(await short.step("on")) == "1: on"


async def test_a_session_that_comes_from_another_worker_ends_where_its_journal_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its calls there may be such as are refused, and add nothing to it."""
    monkeypatch.setattr(host, "JOURNALS_BYTES", 60_000)
    ends: list[tuple[str, str]] = []
    async with session_fixture(slots=8) as here:
        for worker in ("e1", "e2"):
            await here.fleet.heard(here.worker(worker, World()))
        for session in ("a", "b", "c"):
            await ask(here, "e1", SessionCall(session=session, call="open", key="o", task=TASK))
            for number in range(8):
                await ask(here, "e1", SessionCall(session=session, call="state", key=f"{number}", text=LONG))
            moved = await ask(here, "e2", SessionCall(session=session, call="step", key="early"))
            ends.append((moved.refusal, moved.error_class))
            assert (await ask(here, "e1", SessionCall(session=session, call="state", key="late"))).refusal == "moved"
        assert (await ask(here, "e2", SessionCall(session="a", call="state", key="on"))).refusal == ""
    assert ends == [("conflict", ""), ("closed", "journal_full"), ("closed", "journal_full")]


async def test_a_journal_that_grows_by_claims_alone_reaches_its_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "JOURNAL_BYTES", 50_000)
    async with session_fixture(slots=8) as here:
        for worker in ("e1", "e2"):
            await here.fleet.heard(here.worker(worker, World()))
        task = msgspec.structs.replace(TASK, prompt=LONG)
        await ask(here, "e1", SessionCall(session="s", call="open", key="o", task=task))
        for number in range(20):
            new, old = ("e1", "e2") if number % 2 else ("e2", "e1")
            moved = await ask(here, new, SessionCall(session="s", call="step", key=f"early{number}"))
            await ask(here, old, SessionCall(session="s", call="state", key=f"late{number}"))
        journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, "s")
    assert (moved.end, moved.error_class, journal.size_bytes < 60_000) == ("lost", "journal_full", True)


async def test_a_call_that_waits_for_a_replica_that_is_behind_keeps_no_journal() -> None:
    async with session_fixture(slots=8) as here:
        await here.fleet.heard(here.worker("e1", World()))
        for number in range(10):
            await ask(here, "e1", SessionCall(session=f"s{number}", call="open", key="o", task=TASK))
            await ask(here, "e1", SessionCall(session=f"s{number}", call="close", key="c"))

        async def call(number: int) -> None:
            ahead = SessionCall(session=f"s{number}", call="state", key="k", number=1000)
            assert (await ask(here, "e1", ahead)).refusal == "closed"

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(call, number)
            await anyio.sleep(sum(LAG_PAUSES_SECONDS) / 2)
            gc.collect()
            assert [each for each in gc.get_objects() if type(each) is Journal and each.records] == []


async def test_a_claim_that_waits_for_a_full_log_keeps_no_journal_and_goes_on_with_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish, is_full, refused = MemoryBus.publish, True, anyio.Semaphore(0)

    async def store(bus: MemoryBus, subject: str, payload: bytes, **options: Any) -> Any:
        if is_full and ".session." in subject:
            refused.release()
            raise LogFull(f"{subject}: maximum bytes exceeded")
        return await publish(bus, subject, payload, **options)

    async with session_fixture(slots=8) as here:
        dying = here.worker("e1", World())
        await here.fleet.heard(dying, here.worker("e2", World()))
        for number in range(8):
            await ask(here, "e1", SessionCall(session=f"s{number}", call="open", key="o", task=TASK))
            await ask(here, "e1", SessionCall(session=f"s{number}", call="reset", key="r"))
        dying.kill()
        monkeypatch.setattr(MemoryBus, "publish", store)
        answers: list[SessionAnswer] = []

        async def step(number: int) -> None:
            answers.append(await ask(here, "e2", SessionCall(session=f"s{number}", call="step", key="s", text="on", number=2)))

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(step, number)
            for _ in range(8):
                await refused.acquire()
            await anyio.lowlevel.checkpoint()
            gc.collect()
            held = [each for each in gc.get_objects() if type(each) is Journal and each.records]
            is_full = False
        assert held == []
        assert [read_text(answer) for answer in answers] == ["1: on"] * 8


async def test_a_client_that_looks_for_the_worker_of_a_session_reads_no_whole_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[str]] = []

    async def history(_: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
        read.append(subjects)
        return []

    async with session_fixture() as here:
        await here.fleet.heard(here.worker("e1", World()), here.worker("e2", World()))
        async with here.client.open(TASK) as session:
            await session.reset()
            with monkeypatch.context() as patched:
                patched.setattr(MemoryBus, "history", history)
                async with sessions(here.fleet.bus, here.fleet.subjects) as other:
                    answer = await other.call(SessionCall(session=session.name, call="state", key="k"), timeout=60)
    assert (answer.state, answer.refusal, read) == ({"count": 0}, "", [])


async def test_a_call_that_has_waited_for_a_slot_finds_what_was_done_elsewhere_meanwhile() -> None:
    async with session_fixture(slots=1) as here:
        await here.fleet.heard(here.worker("e1", World()))
        opened = SessionCall(session="s", call="open", key="k", task=TASK, wait_seconds=60)
        answers: list[SessionAnswer] = []
        await ask(here, "e1", SessionCall(session="holder", call="open", key="h", task=TASK))
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                answers.append(await ask(here, "e1", opened))

            group.start_soon(wait)
            await here.fleet.heard(here.worker("e2", World()))
            done = await ask(here, "e2", opened)
            await ask(here, "e2", SessionCall(session="s", call="close", key="c"))
            await ask(here, "e1", SessionCall(session="holder", call="close", key="c"))
        assert answers == [done]


async def test_of_sessions_that_are_not_here_a_few_journals_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    history, under_way, most = MemoryBus.history, 0, 0

    async def counted(bus: MemoryBus, subjects: Sequence[str]) -> list[StreamEntry]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await anyio.sleep(0.01)
            return await history(bus, subjects)
        finally:
            under_way -= 1

    async with session_fixture(slots=8) as here:
        await here.fleet.heard(here.worker("e1", World()))
        monkeypatch.setattr(MemoryBus, "history", counted)
        refusals: list[str] = []

        async def call(number: int) -> None:
            refusals.append((await ask(here, "e1", SessionCall(session=f"s{number}", call="close", key="k", number=0))).refusal)

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(call, number)
    assert refusals == ["unknown"] * 30
    assert most == journal_reads.READS_AT_ONCE
