"""Threads, random names and a clock of files, as a simulated process has them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import anyio

from fleetbus.concurrency.runtime import Runtime
from tests.simulation.deployment.fixtures import SimulationFixtures
from tests.simulation.platform.process import Process


def build_runtime(fixtures: SimulationFixtures, process: Process, *, seconds: float = 1.0) -> Runtime:
    """Blocking work runs inline and takes up to ``seconds`` before and after; file times are virtual, too."""
    draw = random.Random(f"ports/{fixtures.scenario.seed}/{process.name}")
    count = 0

    async def offload(function: Any, *args: Any, **options: Any) -> Any:
        await anyio.sleep(draw.uniform(0, seconds))
        result = fixtures.disks.run(process, function, *args, **options)
        if isinstance(result, Path):
            now_ns = fixtures.server.now_ns()
            os.utime(result, ns=(now_ns, now_ns))
        await anyio.sleep(draw.uniform(0, seconds))
        return result

    def nonce() -> str:
        nonlocal count
        count += 1
        return f"{process.name}_{count}"

    return Runtime(offload=offload, nonce=nonce)
