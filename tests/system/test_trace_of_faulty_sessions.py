"""Traces of sessions whose workers are killed, drained and cut off, whose clients go away, whose environments fail: every one
is a tree, and says what its journal says."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from fleetbus.client.sessions import Session, SessionFailed
from fleetbus.core.episode.trace_ids import compute_session_trace_id
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.span import Span
from tests.support.small_deployment import RUN
from tests.support.stepwise_fixtures import TASK, SessionFixture, World, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def opened(here: SessionFixture) -> Session:
    """A session after its first step, which nobody closes."""
    session = here.client.session()
    await session.request("open", task=TASK)
    await session.reset(seed=3)
    await session.step("one")
    return session


async def traced(here: SessionFixture, session: Session, end: str) -> list[Span]:
    """The spans of one session, held against its journal."""
    traces = LogTraces(RUN, sessions=[session.name])
    spans = [span async for entry in here.fleet.bus.scan([here.fleet.subjects.log]) for span in traces.add(entry)]
    assert (traces.sessions, traces.open_sessions) == (1, 0)
    assert {span.trace_id for span in spans} == {compute_session_trace_id(RUN, session.name)}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span came twice"
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id:
            assert by_id[span.parent_id].start_ns <= span.start_ns and span.end_ns <= by_id[span.parent_id].end_ns
    journal = await read_session_journal(here.fleet.bus, here.fleet.subjects, session.name)
    calls = Counter(record.call.call for record in journal.records)
    assert Counter(span.name for span in spans if "fleetbus.call.key" in span.attributes) == calls
    (root,) = [span for span in spans if span.name == "session"]
    assert root.attributes["fleetbus.session.end"] == end and bool(root.error) == (end != "closed")
    assert journal.ended is not None and journal.ended.end == end
    return spans


def attempts(spans: list[Span]) -> list[tuple[str, object]]:
    return [(span.worker, span.attributes["fleetbus.attempt.end"]) for span in spans if span.name == "attempt"]


@pytest.mark.parametrize("how", ["kill", "drain", "cut"])
async def test_a_session_that_moved_has_an_attempt_at_each_worker(how: str) -> None:
    async with session_fixture() as here:
        first = here.worker("e1", World())
        session = await opened(here)
        here.worker("e2", World())
        if how == "drain":
            first.drain.set()
            await first.ended.wait()
        else:
            first.kill() if how == "kill" else first.cut()
        await session.step("two")
        await session.verify()
        await session.close()
        spans = await traced(here, session, "closed")
        assert attempts(spans) == [("e1", "moved"), ("e2", "closed")]
        assert Counter(span.name for span in spans)["restore"] == 1
        if how == "cut":
            first.kill()


async def test_a_session_that_cannot_be_done_again_ends_where_it_was_taken_over() -> None:
    async with session_fixture() as here:
        first = here.worker("e1", World(replayable=False))
        session = await opened(here)
        here.worker("e2", World(replayable=False))
        first.kill()
        with pytest.raises(SessionFailed):
            await session.step("two")
        spans = await traced(here, session, "lost")
        assert attempts(spans) == [("e1", "moved"), ("e2", "lost")]
        assert "not_replayable" in spans[-1].error


async def test_an_environment_that_raises_is_the_error_of_its_call_and_of_the_session() -> None:
    world = World()
    async with session_fixture() as here:
        here.worker("e1", world)
        session = await opened(here)
        world.error = ValueError("the board is gone")
        with pytest.raises(SessionFailed):
            await session.step("two")
        spans = await traced(here, session, "env_failed")
        failed = [span for span in spans if span.error]
        assert [span.name for span in failed] == ["step", "attempt", "session"]
        assert all("the board is gone" in span.error for span in failed)


async def test_a_client_that_never_comes_back_is_told() -> None:
    async with session_fixture(idle=30) as here:
        worker = here.worker("e1", World())
        session = await opened(here)
        await here.empty(worker)
        await anyio.sleep(60)
        spans = await traced(here, session, "idle")
        assert attempts(spans) == [("e1", "idle")]


async def test_a_session_that_nobody_has_any_more_ended_long_before_it_was_found() -> None:
    async with session_fixture(idle=30) as here:
        first = here.worker("e1", World())
        session = await opened(here)
        first.kill()
        here.worker("e2", World())
        await anyio.sleep(1000)
        spans = await traced(here, session, "orphaned")
        (attempt,) = [span for span in spans if span.name == "attempt"]
        (root,) = [span for span in spans if span.name == "session"]
        assert attempt.worker == "e1" and root.end_ns - attempt.end_ns > 60e9
