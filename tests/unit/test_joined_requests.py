"""A learner that trains what another one asks for takes up each request once, whatever stands in the log twice."""

from __future__ import annotations

from collections.abc import Sequence

import anyio.lowlevel
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import LimitSettings
from fleetbus.core.training.ledger import Ledger
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import (
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    FloorRaised,
    Message,
    SamplingSettings,
    SeatPolicy,
    Subjects,
    Task,
    encode,
)
from fleetbus_workers.learner.joined_requests import CHECK_SECONDS, JoinedRequests
from fleetbus_workers.learner.pool import GroupPool
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("run")
POLICY, ASKING = "solver", "default"
LIMITS = LimitSettings(episode=60, grace=10)
OVERDUE_SECONDS = LIMITS.episode + LIMITS.grace

anyio_backend = virtual_time


def build() -> tuple[JoinedRequests, GroupPool]:
    pool = GroupPool(Ledger(), minimum=2, max_staleness=0, policy=POLICY)
    return JoinedRequests(pool, policy=POLICY, requested_by=ASKING, next_group=0, steps=4, limits=LIMITS), pool


def stored(sequence: int, subject: str, message: Message) -> StreamEntry:
    return StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=0)


def request(sequence: int, group: int, *, deadline_ns: int = 1) -> StreamEntry:
    message = EpisodeRequested(
        episode_id=f"g{group:06d}-0",
        group_id=f"g{group:06d}",
        sample_index=0,
        group_size=1,
        split="train",
        task=Task(key="t"),
        policy=ASKING,
        sampling=SamplingSettings(),
        max_turns=2,
        max_tokens=64,
        deadline_ns=deadline_ns,
        lineage="l1",
        seats=(SeatPolicy(seat="solver", policy=POLICY, trained=True),),
    )
    return stored(sequence, SUBJECTS.task("default", message.episode_id), message)


def test_a_copy_of_a_request_that_left_the_log_is_no_group_of_its_own() -> None:
    """A group that nobody plays would be counted as open for ever, and who asks would wait for it."""
    joined, pool = build()
    joined.enter(request(1, 7))
    assert pool.group_ids == ("g000007",)
    joined.enter(stored(5, SUBJECTS.floor, FloorRaised(sequence=4, groups={ASKING: 7, POLICY: 7})))
    joined.enter(request(6, 3))
    joined.enter(request(7, 8))
    assert pool.group_ids == ("g000007", "g000008")
    assert joined.next_group == 9


def test_the_floor_of_the_policy_that_asks_is_not_that_of_the_one_that_joins() -> None:
    joined, pool = build()
    joined.enter(stored(1, SUBJECTS.floor, FloorRaised(sequence=1, groups={ASKING: 7, POLICY: 3})))
    joined.enter(request(2, 2))
    joined.enter(request(3, 3))
    assert pool.group_ids == ("g000003",)
    assert SUBJECTS.floor in joined.list_subjects(SUBJECTS)


async def store_result(bus: MemoryBus) -> None:
    """The result of the first episode of group 7, of a worker that had read its request."""
    result = EpisodeFinished(episode_id="g000007-0", group_id="g000007", attempt=1, outcome="env_failed", worker="w")
    await bus.publish(SUBJECTS.episode(result.episode_id), encode(result))


async def test_a_result_that_stands_before_its_request_is_found_once_the_episodes_time_is_over() -> None:
    """A worker lived on when the log lost the request, and stored the result; then the learner that asks stored it again."""
    joined, pool = build()
    async with MemoryServer().connect("run") as bus, anyio.create_task_group() as group:
        await bus.declare(plan_run("run", lanes=1))
        await store_result(bus)
        started = anyio.current_time()
        joined.enter(request(2, 7, deadline_ns=bus.now_ns() + int(LIMITS.episode * 1e9)))
        group.start_soon(joined.follow, bus, SUBJECTS)
        with anyio.fail_after(10 * OVERDUE_SECONDS):
            while pool.group_ids:
                await pool.changed.wait()
        assert OVERDUE_SECONDS <= anyio.current_time() - started <= OVERDUE_SECONDS + 2 * CHECK_SECONDS
        group.cancel_scope.cancel()
    assert pool.take_exclusions() == [Exclusion(episode_id="g000007-0", reason="env_failed")]


@pytest.mark.parametrize("hours", [0, -5, 5])
async def test_the_log_is_asked_once_per_grace_for_a_result_that_is_overdue(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Whatever the server's clock is set to meanwhile, and whether it answers."""
    reads: list[float] = []
    joined, pool = build()
    server = MemoryServer()
    async with server.connect("run") as bus, anyio.create_task_group() as group:
        await bus.declare(plan_run("run", lanes=1))
        history = bus.history

        async def counted(subjects: Sequence[str]) -> list[StreamEntry]:
            reads.append(anyio.current_time())
            if len(reads) == 2:
                raise RequestUnanswered("no answer")
            return await history(subjects)

        monkeypatch.setattr(bus, "history", counted)
        started = anyio.current_time()
        joined.enter(request(2, 7, deadline_ns=bus.now_ns() + int(LIMITS.episode * 1e9)))
        group.start_soon(joined.follow, bus, SUBJECTS)
        await anyio.sleep(2 * CHECK_SECONDS)
        server.step_clock(hours * 3600)
        await anyio.sleep_until(started + OVERDUE_SECONDS + 3 * LIMITS.grace)
        assert pool.group_ids == ("g000007",)
        assert 3 <= len(reads) <= 4 and reads[0] >= started + OVERDUE_SECONDS
        await store_result(bus)
        with anyio.fail_after(2 * LIMITS.grace):
            while pool.group_ids:
                await pool.changed.wait()
        group.cancel_scope.cancel()


async def test_of_a_hundred_thousand_open_episodes_few_are_looked_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is on the learner's event loop has its turn in between: heartbeats, and results that are read."""
    joined, pool = build()
    for number in range(12_500):
        pool.admit(f"g{number:06d}", 8)
        for index in range(8):
            pool.expect(f"g{number:06d}-{index}", f"g{number:06d}", 1)
    since, most, looked_through = 0, 0, 0
    list_unanswered = pool.list_unanswered

    def count(*arguments: str) -> dict[str, int]:
        nonlocal since, most, looked_through
        found = list_unanswered(*arguments)
        since, looked_through = since + len(found), looked_through + len(found)
        most = max(most, since)
        return found

    async def take_turns() -> None:
        nonlocal since
        while True:
            since = 0
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(pool, "list_unanswered", count)
    async with anyio.create_task_group() as group:
        group.start_soon(take_turns)
        overdue = await joined._list_overdue(2)
        group.cancel_scope.cancel()
    assert looked_through == 100_000 and overdue == [] and most <= 10_000
