"""The memory of the NATS wrapper stays small, however long it works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.nats import connect, pull_requests
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.pull_subscription import NatsSubscription
from fleetbus.bus.nats.reader import NatsReader
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus_schemas import Subjects

RUN = "r"
SUBJECTS = Subjects(RUN)


@asynccontextmanager
async def declared(store: Path) -> AsyncIterator[NatsBus]:
    with anyio.fail_after(50):
        async with run_server(store) as server, connect(server.url, run=RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            assert isinstance(bus, NatsBus)
            yield bus


async def test_a_puller_that_never_rests_forgets_the_requests_that_were_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says nothing of a request that it filled, and with credits left at all times there is no clean slate."""
    monkeypatch.setattr(pull_requests, "_FORGET_SECONDS", 0.0)
    async with declared(tmp_path) as bus, bus.pull(tasks_consumer("default"), credits=64) as subscription:
        assert isinstance(subscription, NatsSubscription)
        for number in range(150):
            async with anyio.create_task_group() as group:
                for index in range(5):
                    group.start_soon(bus.publish, SUBJECTS.task("default", f"e{number}-{index}"), b"x")
            for _ in range(5):
                await (await subscription.receive()).ack()
                subscription.grant()
            assert subscription.credits == 64
        assert subscription._pull_requests._count > 20, "too few requests to tell"
        assert len(subscription._pull_requests._requests) <= 2


async def test_a_puller_or_reader_that_has_left_does_not_come_back_when_the_server_answers(tmp_path: Path) -> None:
    """Its own task may have the answer already when it is cancelled, and attach once more: nobody would ever take what that
    pulls, and its handler would stay."""
    async with declared(tmp_path) as bus:
        handlers = bus._connection.wire._handlers
        await bus._connection.round_trip(5)
        before = set(handlers)
        async with bus.pull(tasks_consumer("default"), credits=4) as subscription:
            assert isinstance(subscription, NatsSubscription)
        async with bus.read([SUBJECTS.episodes]) as reader:
            assert isinstance(reader, NatsReader)
        subscription.attach()
        await reader._attach()
        while set(handlers) - before:  # noqa: ASYNC110  # the goodbye of the puller takes a round trip
            await anyio.sleep(0.01)
        await bus.publish(SUBJECTS.task("default", "e"), b"x")
        async with bus.pull(tasks_consumer("default"), credits=1) as other:
            assert (await other.receive()).delivered == 1


async def test_a_scan_by_several_filters_asks_for_no_consumer_that_has_more_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two filters the server took 6 s for what takes it less than one with two consumers."""
    asked: list[list[str]] = []
    question = NatsReader._build_create_request

    def noted(reader: NatsReader, name: str) -> dict[str, Any]:
        asked.append(reader._subjects)
        return question(reader, name)

    monkeypatch.setattr(NatsReader, "_build_create_request", noted)
    async with declared(tmp_path) as bus:
        for subject in (SUBJECTS.task("default", "e"), SUBJECTS.episode("e"), SUBJECTS.train("default")):
            await bus.publish(subject, b"x")
        found = [entry.sequence async for entry in bus.scan([SUBJECTS.episodes, SUBJECTS.tasks()])]
    assert found == [1, 2] and sorted(asked) == sorted([[SUBJECTS.episodes], [SUBJECTS.tasks()]])
