"""Engines of one process, as those of an evaluation with seats, never load side by side."""

from __future__ import annotations

import threading
import time

import anyio

from fleetbus_workers.assembly.engines import load_alone


async def test_what_engines_load_is_loaded_one_after_the_other() -> None:
    loading, most = 0, 0
    counted = threading.Lock()

    def load(seconds: float) -> None:
        nonlocal loading, most
        with counted:
            loading += 1
            most = max(most, loading)
        time.sleep(seconds)
        with counted:
            loading -= 1

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(load_alone, load, 0.05)
    assert most == 1
