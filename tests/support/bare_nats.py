"""A declared run on the bus, and what the bare nats-py client beside it needs: for tests that compare the two."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects

RUN = "traps"
SUBJECTS = Subjects(RUN)


@asynccontextmanager
async def ready_bus(url: str, **options: Any) -> AsyncGenerator[Any]:
    """With its streams declared; `Any` because the tests look below the `Bus` protocol."""
    async with connect(url, run=RUN, **options) as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
        yield bus


async def ignore_error(error: Exception) -> None:
    """An error callback of the bare client: the tests provoke errors on purpose."""
