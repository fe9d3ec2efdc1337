"""Attempts whose Action is late read the log, a few at a time however many there are."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio

from fleetbus_workers.environment.episode.attempts import CHECKS_AT_ONCE, Attempts


async def test_thousands_that_are_late_at_once_do_not_ask_the_server_at_once() -> None:
    late, woken = 5 * CHECKS_AT_ONCE + 1, list[float]()

    def recheck_if_late(now: float) -> bool:
        if len(woken) == late:
            return False
        woken.append(anyio.current_time())
        return True

    attempts: Any = Attempts.__new__(Attempts)
    attempts._context = SimpleNamespace(limits=SimpleNamespace(late=0.01))
    client = SimpleNamespace(policy_client=SimpleNamespace(recheck_if_late=recheck_if_late))
    attempts._running = {f"e{number}": client for number in range(late)}
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(attempts.watch_late_answers)
            while len(woken) < late:  # noqa: ASYNC110 - what is tested has no event
                await anyio.sleep(0.005)
            group.cancel_scope.cancel()
    moments = [woken[start] for start in range(0, late, CHECKS_AT_ONCE)]
    assert all(later - earlier >= 0.04 for earlier, later in pairwise(moments))
