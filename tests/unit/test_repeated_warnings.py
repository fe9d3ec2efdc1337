"""Waiting for a server that is away is said once, then how often, at growing intervals; all else that is said stays."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anyio
import pytest
import structlog

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import LogSettings
from fleetbus.log.episodes import store_message
from fleetbus.logs.repeated import LONGEST_INTERVAL_SECONDS, QUIET_SECONDS, RepeatedWarnings
from fleetbus.logs.setup import configure_logs
from fleetbus_schemas import AttemptReleased, Subjects
from tests.support.virtual_time import virtual_time

OUTAGE_SECONDS = 18 * 60
EPISODES = 64


anyio_backend = virtual_time


@pytest.fixture
def said(anyio_backend: object) -> Iterator[list[dict[str, Any]]]:
    """Every line, as it would be rendered."""
    lines: list[dict[str, Any]] = []

    def keep(_logger: object, _method: str, event: Any) -> Any:
        lines.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[RepeatedWarnings(clock=anyio.current_time).process, keep])
    yield lines
    structlog.reset_defaults()


async def test_an_outage_is_a_handful_of_lines_that_count_what_they_leave_out(said: list[dict[str, Any]]) -> None:
    server, subjects = MemoryServer(), Subjects("r")
    async with server.connect("r") as bus, anyio.create_task_group() as group:
        await bus.declare(plan_run("r", lanes=1))
        server.kill()
        for index in range(EPISODES):
            released = AttemptReleased(episode_id=f"e{index}", attempt=1, worker="w")
            group.start_soon(store_message, bus, subjects.episode(f"e{index}"), released)
        await anyio.sleep(OUTAGE_SECONDS)
        server.restart()
    warnings = [line for line in said if line["event"] == "publish failed; retrying"]
    assert 2 <= len(warnings) <= 8
    assert sum(line.get("repeated", 0) for line in warnings) > 10 * EPISODES


async def test_intervals_grow_to_a_limit_and_a_new_outage_is_said_at_once() -> None:
    warnings, spoken = RepeatedWarnings(clock=anyio.current_time), []
    for second in range(3600):
        if warnings.count("publish failed; retrying") is not None:
            spoken.append(second)
        await anyio.sleep(1)
    gaps = [after - before for before, after in pairwise(spoken)]
    assert gaps[:4] == [30, 60, 120, 240]
    assert set(gaps[5:]) == {LONGEST_INTERVAL_SECONDS}
    assert warnings.count("another; retrying") == 0
    await anyio.sleep(QUIET_SECONDS + 1)
    assert warnings.count("publish failed; retrying") is not None
    assert warnings.count("publish failed; retrying") is None


def test_only_warnings_that_say_that_something_is_retried_are_counted(anyio_backend: object) -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(format="json"), stream=stream)
    for episode in ("a", "b"):
        structlog.get_logger().warning("environment failed", episode=episode)
        structlog.get_logger().warning("publish failed; retrying", episode=episode)
        logging.getLogger("fleetbus.bus.nats.connection").warning("nats: no answer from the server for %g s; reconnecting", 3)
        logging.getLogger("other").warning("a library's own")
    lines = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert lines.count("environment failed") == 2
    assert lines.count("publish failed; retrying") == 1
    assert lines.count("nats: no answer from the server for 3 s; reconnecting") == 1
    assert lines.count("a library's own") == 2
