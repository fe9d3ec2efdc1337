"""Runs a benchmark that starts processes so that a signal ends it as its end does: with everything that it started."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


async def run_until_signal(run: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """The report of ``run``; an empty one if SIGINT or SIGTERM cancelled it."""
    report: dict[str, Any] = {}
    async with anyio.create_task_group() as tasks:

        async def obey() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(obey)
        report = await run()
        tasks.cancel_scope.cancel()
    return report
