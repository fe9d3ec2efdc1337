"""A long run is shown from its newest entries at once, says so, and is counted wholly once all of its log is read."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import RequestUnanswered
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Heartbeat, TrainingFinished, WorkerStopped, encode
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run import run_observer
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Driver
from fleetbus_workers.observe.top.view import build_facts, screen
from tests.support.log_builder import SUBJECTS, LogBuilder, start_log

EPISODES, GROUP = 40, 4
SHORT = 30
"""Entries that are read first."""


class OlderEntriesLater:
    """A bus whose scans from the beginning wait for ``released``, and fail ``failures`` times after ``fails_after`` entries."""

    def __init__(self, bus: Bus, *, failures: int = 0, fails_after: int = 0) -> None:
        self._bus = bus
        self._failures, self._fails_after = failures, fails_after
        self.released = anyio.Event()
        self.starts: list[int] = []
        self.at_end: Callable[[], Awaitable[None]] | None = None
        """Called when all is read and the reader does not know it yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
        is_older = SUBJECTS.tasks() in subjects and (start == 1 or len(self.starts) > 0)
        if is_older:
            self.starts.append(start)
            await self.released.wait()
        count = 0
        async for entry in self._bus.scan(subjects, start=start):
            if is_older and self._failures and count == self._fails_after:
                self._failures -= 1
                raise RequestUnanswered("planted")
            count += 1
            yield entry
        if is_older and self.at_end is not None:
            await self.at_end()


def build_long_log() -> LogBuilder:
    """One lineage, a step of each group of episodes."""
    log = start_log()
    for step in range(EPISODES // GROUP):
        names = [f"e{step * GROUP + index}" for index in range(GROUP)]
        for name in names:
            log.play(name)
        log.step(step + 1, names)
        log.version(step + 1)
    return log


@asynccontextmanager
async def watched(log: LogBuilder, monkeypatch: pytest.MonkeyPatch, **faults: int) -> AsyncIterator[tuple[Any, RunObserver]]:
    monkeypatch.setattr(run_observer, "RECENT_ENTRIES", SHORT)
    monkeypatch.setattr(run_observer, "RECENT_TRAINING_ENTRIES", 3 * SHORT)
    monkeypatch.setattr(run_observer, "RETRY_SECONDS", 0.0)
    with anyio.fail_after(10):
        async with MemoryServer().connect(SUBJECTS.run) as bus:
            await bus.declare(plan_run(SUBJECTS.run, lanes=1))
            for subject, payload in log.entries:
                await bus.publish(subject, payload)
            later = OlderEntriesLater(bus, **faults)
            driver = Driver(is_driving=lambda: False)
            watch = RunObserver(later, SUBJECTS, RunState(100), driver, recent_first=True)  # type: ignore[arg-type]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.run)
                yield later, watch
                tasks.cancel_scope.cancel()


async def wait_until(watch: RunObserver, *, followed: int, whole: bool) -> None:
    while watch.health.followed < followed or watch.is_whole != whole:  # noqa: ASYNC110 - it tells nobody
        await anyio.sleep(0.001)


def fold(log: LogBuilder) -> dict[str, Any]:
    """What an overview counts that reads from the beginning."""
    state = RunState(100)
    for sequence, (subject, payload) in enumerate(log.entries, 1):
        entry = StreamEntry(subject=subject, payload=payload, sequence=sequence, time_ns=0)
        if subject.split(".")[2] not in ("obs", "act"):
            message = read_stored(entry)
            assert message is not None
            state.apply(entry, message, 0.0, 0)
    return count(state)


def count(state: RunState) -> dict[str, Any]:
    numbers = build_numbers(RunView(state, now_ns=0))
    timeless = {name: value for name, value in numbers.items() if not name.endswith(("seconds", "per_second"))}
    return timeless | {"steps": [point.step for point in state.training.steps], "rows": list(state.episodes.rows)}


async def test_the_newest_entries_are_shown_while_the_older_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch) as (_, watch):
        await wait_until(watch, followed=len(log.entries), whole=False)
        now = anyio.current_time()
        assert watch.health.counted_from == len(log.entries) - SHORT + 1 and not watch.is_behind(now)
        numbers = build_numbers(RunView(watch.state, now_ns=0))
        assert (numbers["step"], numbers["version"]) == (EPISODES // GROUP,) * 2
        assert 0 < numbers["finished_episodes"] < EPISODES
        steps = [point.step for point in watch.state.training.steps]
        assert steps[-1] == EPISODES // GROUP and len(steps) > numbers["finished_episodes"] // GROUP
        assert not watch.may_be_stuck(now) and watch.find_termination(now) is None


async def test_what_is_shown_says_from_which_entry_on_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    log = build_long_log()
    async with watched(log, monkeypatch) as (later, watch):

        def show() -> str:
            facts = build_facts(RunView(watch.state, watch.health, now=anyio.current_time()), run="run")
            shown = io.StringIO()
            Console(width=80, file=shown).print(screen(facts))
            return shown.getvalue()

        await wait_until(watch, followed=len(log.entries), whole=False)
        assert f"counts begin at entry {len(log.entries) - SHORT + 1}" in show()
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert "counts begin" not in show()


async def test_once_all_is_read_everything_counts_as_if_it_was_read_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch) as (later, watch):
        await wait_until(watch, followed=len(log.entries), whole=False)
        shown = watch.state.history
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert count(watch.state) == fold(log)
        assert watch.state.history > shown, "curves that were drawn are drawn again"


async def test_what_is_stored_meanwhile_is_shown_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch) as (later, watch):
        await wait_until(watch, followed=len(log.entries), whole=False)
        for _ in range(2):
            known = len(log.entries)
            log.play(f"late{known}")
            log.step(known, [f"late{known}"])
            for subject, payload in log.entries[known:]:
                await later.publish(subject, payload)
            await wait_until(watch, followed=len(log.entries), whole=later.released.is_set())
            assert watch.state.progress.step == known
            later.released.set()
            await wait_until(watch, followed=len(log.entries), whole=True)
        assert count(watch.state) == fold(log)


async def test_what_is_stored_at_the_moment_of_the_change_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch) as (later, watch):
        played = anyio.Event()

        async def play_one() -> None:
            known = len(log.entries)
            log.play("late")
            for subject, payload in log.entries[known:]:
                await later.publish(subject, payload)
            await wait_until(watch, followed=len(log.entries), whole=False)
            played.set()

        later.at_end = play_one
        later.released.set()
        await played.wait()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert count(watch.state) == fold(log)


async def test_a_read_that_the_server_left_unanswered_continues_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch, failures=3, fails_after=7) as (later, watch):
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert count(watch.state) == fold(log)
        assert len(later.starts) == 4 and later.starts == sorted(set(later.starts))


async def test_workers_that_were_heard_meanwhile_stay_known(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_long_log()
    async with watched(log, monkeypatch) as (later, watch):
        await wait_until(watch, followed=len(log.entries), whole=False)
        beat = Heartbeat(role="inference", worker="inf", slots=4)
        while not watch.state.worker_registry.rows(anyio.current_time()):
            await later.broadcast(SUBJECTS.heartbeat("inference", "inf"), encode(beat))
            await anyio.sleep(0.001)
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert [row.worker for row in watch.state.worker_registry.rows(anyio.current_time())] == ["inf"]


@pytest.mark.parametrize("is_early", [False, True])
async def test_how_a_run_ended_is_not_guessed_before_its_end_was_read(monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
    """An end that lies before the newest entries is known once all is read."""
    log = build_long_log()
    stopped = WorkerStopped(role="learner", worker="learner")
    if is_early:
        log.entries.insert(2, (SUBJECTS.life("learner", "learner"), encode(stopped)))
    else:
        log.add(SUBJECTS.life("learner", "learner"), stopped)
    async with watched(log, monkeypatch) as (later, watch):
        await wait_until(watch, followed=len(log.entries), whole=False)
        ending = watch.find_termination(anyio.current_time())
        assert ending is None if is_early else ending is not None and ending.how == "stopped"
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        ending = watch.find_termination(anyio.current_time())
        assert ending is not None and ending.how == "stopped"


async def test_a_short_log_is_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    log = start_log()
    log.play("e1")
    async with watched(log, monkeypatch) as (later, watch):
        later.released.set()
        await wait_until(watch, followed=len(log.entries), whole=True)
        assert later.starts == [1] and watch.state.progress.episodes == 1


def test_steps_count_whose_lineage_began_before_what_is_read() -> None:
    """As beside a recorder, which removes what is settled."""
    training = RunState(9).training
    log = LogBuilder()
    for step in (7, 8):
        log.step(step, [])
    log.lineage("l2", "l1", 7)
    log.step(8, [], lineage="l2")
    log.add(SUBJECTS.train("default"), TrainingFinished(lineage="l2", step=8, version=8))
    for sequence, (subject, payload) in enumerate(log.entries, 1):
        message = read_stored(StreamEntry(subject=subject, payload=payload, sequence=sequence, time_ns=0))
        assert message is not None
        training.apply(message, 0)
    assert [(point.lineage, point.step) for point in training.steps] == [("l1", 7), ("l2", 8)]
    assert training.is_finished
