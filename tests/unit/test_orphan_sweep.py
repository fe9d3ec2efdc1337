"""Sessions whose worker and client are gone are ended, however often the server does not answer."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import LimitSettings
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import LogFull
from fleetbus_schemas import SessionClaimed, SessionEnded, Subjects, Task, encode
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.environment.stepwise.orphan_sweep import OrphanSweep
from tests.support.virtual_time import virtual_time

S = Subjects("r")
LIMITS = LimitSettings(idle=60, open=1, reset=1, step=1, verify=1)

anyio_backend = virtual_time


def get_step_seconds(_: Journal) -> float:
    return LIMITS.step


class NothingStored(Faults):
    """While ``is_losing`` nothing that is sent arrives."""

    def __init__(self) -> None:
        self.is_losing = False
        self.lost = 0

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        self.lost += self.is_losing
        return PublishFault(lost="message") if self.is_losing else NO_PUBLISH_FAULT


async def test_an_orphan_whose_end_was_not_stored_is_ended_by_a_later_sweep() -> None:
    """Forgotten, it stayed open for ever, and nothing that came after it left the log."""
    faults, released = NothingStored(), list[str]()

    async def release(journal: Journal) -> None:
        assert journal.claim is not None
        released.append(journal.claim.session)

    async with MemoryServer(faults=faults).connect("r", worker="w") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        for session in ("a", "b"):
            claim = SessionClaimed(session=session, attempt=1, worker="gone", nonce=session, task=Task(key="t"))
            await bus.publish(S.session(session), encode(claim))
        faults.is_losing = True
        tasks.start_soon(
            OrphanSweep(bus, S, worker="w", limits=LIMITS, release=release, find_step_seconds=get_step_seconds).run
        )
        await anyio.sleep(300)
        faults.is_losing = False
        await anyio.sleep(300)
        journals = [await read_session_journal(bus, S, session) for session in ("a", "b")]
        tasks.cancel_scope.cancel()
    assert faults.lost
    assert [journal.ended is not None and journal.ended.end for journal in journals] == ["orphaned", "orphaned"]
    assert sorted(released) == ["a", "b"]


class AnswersLost(Faults):
    """What is sent is stored, and nobody is told."""

    lost = 0

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        is_lost = worker == "w" and subject.startswith(S.session("a"))
        self.lost += is_lost
        return PublishFault(lost="answer") if is_lost else NO_PUBLISH_FAULT


@pytest.mark.parametrize("ended_by", ["w", "other"])
async def test_an_orphan_whose_end_was_stored_without_an_answer_is_released_once_by_who_ended_it(ended_by: str) -> None:
    """What its environment holds elsewhere stayed there: to the next sweep the session was one that had ended."""
    faults, released = AnswersLost(), list[str]()

    async def release(journal: Journal) -> None:
        assert journal.claim is not None and journal.ended is not None
        released.append(journal.claim.session)

    server = MemoryServer(faults=faults)
    async with server.connect("r", worker="setup") as setup, server.connect("r", worker="w") as bus:
        await setup.declare(plan_run("r", lanes=1))
        claim = SessionClaimed(session="a", attempt=1, worker="gone", nonce="a", task=Task(key="t"))
        stored = await setup.publish(S.session("a"), encode(claim))
        if ended_by == "other":
            await anyio.sleep(110)
            end = SessionEnded(session="a", end="orphaned", worker="other")
            await setup.publish(S.session("a"), encode(end), expected_last=stored.sequence)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                OrphanSweep(bus, S, worker="w", limits=LIMITS, release=release, find_step_seconds=get_step_seconds).run
            )
            await anyio.sleep(600)
            tasks.cancel_scope.cancel()
    assert (faults.lost > 0) == (ended_by == "w")
    assert released == (["a"] if ended_by == "w" else [])


async def test_a_full_log_is_asked_once_in_a_sweep_however_many_orphans_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands would have its journal read and a line of its own, with every sweep of every worker."""
    asked: list[str] = []

    async def refuse(subject: str, *_: object, **__: object) -> int:
        asked.append(subject)
        raise LogFull("maximum bytes exceeded")

    async def release(journal: Journal) -> None:
        """No environment holds anything."""

    sweep_seconds, sweeps = 30.5, 5
    async with MemoryServer().connect("r", worker="w") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        for number in range(50):
            session = f"s{number}"
            claim = SessionClaimed(session=session, attempt=1, worker="gone", nonce=session, task=Task(key="t"))
            await bus.publish(S.session(session), encode(claim))
        await anyio.sleep(200)
        with monkeypatch.context() as patched:
            patched.setattr(bus, "publish", refuse)
            tasks.start_soon(
                OrphanSweep(bus, S, worker="w", limits=LIMITS, release=release, find_step_seconds=get_step_seconds).run
            )
            await anyio.sleep(sweep_seconds * sweeps)
        assert 1 < len(asked) <= sweeps
        await anyio.sleep(sweep_seconds)
        ended = [(await read_session_journal(bus, S, f"s{number}")).ended for number in range(50)]
        tasks.cancel_scope.cancel()
    assert all(ended)


async def test_a_session_that_may_still_be_in_a_step_is_no_orphan() -> None:
    async with MemoryServer().connect("r", worker="w") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        claim = SessionClaimed(session="a", attempt=1, worker="busy", nonce="a", task=Task(key="t"))
        await bus.publish(S.session("a"), encode(claim))

        async def release(_: Journal) -> None: ...

        sweep = OrphanSweep(bus, S, worker="w", limits=LIMITS, release=release, find_step_seconds=lambda _: 1000.0)
        tasks.start_soon(sweep.run)
        await anyio.sleep(1000)
        assert (await read_session_journal(bus, S, "a")).ended is None
        await anyio.sleep(200)
        assert (await read_session_journal(bus, S, "a")).ended is not None
        tasks.cancel_scope.cancel()


async def test_an_environment_is_made_once_per_key_however_many_orphans_and_sweeps_there_are() -> None:
    """A constructor that blocks held up the whole worker for each of them, with every sweep."""
    made: list[str] = []

    def make(journal: Journal) -> float:
        assert journal.claim is not None
        made.append(journal.claim.task.env)
        return 1000.0

    async def release(_: Journal) -> None: ...

    async with MemoryServer().connect("r", worker="w") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=1))
        for number in range(20):
            task = Task(key="t", env=f"e{number % 2}")
            claim = SessionClaimed(session=f"s{number}", attempt=1, worker="gone", nonce="n", task=task)
            await bus.publish(S.session(f"s{number}"), encode(claim))
        tasks.start_soon(OrphanSweep(bus, S, worker="w", limits=LIMITS, release=release, find_step_seconds=make).run)
        await anyio.sleep(1200)
        ended = [(await read_session_journal(bus, S, f"s{number}")).ended for number in range(20)]
        tasks.cancel_scope.cancel()
    assert all(ended) and made == ["e0", "e1"]
