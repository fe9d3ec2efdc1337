"""Latencies of tool calls of real work: log-normal with the percentiles of a published trace, and 1 % take ten times as long.

TraceLab (Zhu et al., arXiv:2606.30560; github.com/uw-syfi/TraceLab @ 0b8a262) has 432,510 tool calls of coding agents in daily
use. Of 110,497 calls of the most frequent tool, ``exec_command``, half took at most 323 ms and nine tenths at most 1,002 ms,
which two percentiles are one log-normal distribution. The trace's own tail is heavier, 235 s for the 99th percentile of all
shell commands; one call of a hundred that takes ten times as long, 4.8 s at the mean, is what a benchmark can wait for.

``serve_task`` is the warehouse of the default task with such calls: ``--environment mcp:benchmarks.tool_latencies:serve_task``.
"""

from __future__ import annotations

import math
import random
import statistics
import zlib
from typing import Any

import anyio

from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.warehouse.items import draw_warehouse
from fleetbus_workers.environment.adapters.warehouse.server import WarehouseServer

MEDIAN_SECONDS = 0.323
P90_SECONDS = 1.002
TAIL_SHARE = 0.01
TAIL_FACTOR = 10.0
SIGMA = math.log(P90_SECONDS / MEDIAN_SECONDS) / statistics.NormalDist().inv_cdf(0.9)


def draw_latency(draw: random.Random) -> float:
    """Seconds of one tool call; 0.52 at the mean."""
    seconds = draw.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)
    return seconds * (TAIL_FACTOR if draw.random() < TAIL_SHARE else 1.0)


class SlowWarehouse(WarehouseServer):
    """Waits before it answers."""

    _draw = random.Random()

    async def _call_tool(self, context: Any, params: Any) -> Any:
        await anyio.sleep(draw_latency(self._draw))
        return await super()._call_tool(context, params)


def serve_task(task: Task) -> SlowWarehouse:
    return SlowWarehouse(draw_warehouse(task.seed if task.seed is not None else zlib.crc32(task.key.encode())))


serve_task.replayable = True  # type: ignore[attr-defined]
