"""The periodic jobs of workers: found in the code, hastened, and counted while they run.

A job is an endless loop that sleeps in its own body. One whose sleep is only a pause between two tries of the same thing is in
`RETRIES`; all others have to be driven by `tests/system/test_periodic_jobs_with_keys.py`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = (
    "fleetbus/bus/nats",
    "fleetbus/client",
    "fleetbus/delivery",
    "fleetbus/log",
    "fleetbus/recording",
    "workers/fleetbus_workers/environment/episode",
    "workers/fleetbus_workers/environment/stepwise",
    "workers/fleetbus_workers/gateway",
    "workers/fleetbus_workers/inference",
    "workers/fleetbus_workers/judge",
    "workers/fleetbus_workers/learner",
    "workers/fleetbus_workers/observe",
    "workers/fleetbus_workers/recorder",
)
"""Where code calls the bus on behalf of a role."""

RETRIES = frozenset(
    {
        "fleetbus.bus.nats.client_wire:_open",
        "fleetbus.bus.nats.local_key:_read_greeting",
        "fleetbus.bus.nats.publisher:_send",
        "fleetbus.bus.nats.server:_wait_until_jetstream",
        "fleetbus.client.sessions:call",
        "fleetbus.delivery.lanes:claim_lane",
        "fleetbus.delivery.requests:wait_for_room",
        "fleetbus.log.floor:fence_floor",
        "fleetbus.log.floor:read_floor_after",
        "fleetbus_workers.gateway.gym_service:_open_calls",  # on a bus in memory, which has no rights
        "fleetbus_workers.gateway.gym_service:send_heartbeats",
        "fleetbus_workers.inference.history_cache:_rebuild",
        "fleetbus_workers.inference.turn_order:wait",
        "fleetbus_workers.inference.openai.pool:watch",  # asks engines over HTTP, and no bus
        "fleetbus_workers.judge.client:_ask_in_time",
        "fleetbus_workers.learner.joint_progress:_tell_of_silence",  # logs who is not heard of, and calls no bus
        "fleetbus_workers.observe.monitor.text_search:follow",
        "fleetbus_workers.recorder.worker:_append",  # waits for room on its disk, and calls no bus
    }
)

LONGEST_SECONDS = 0.2


def find_jobs() -> set[str]:
    """The jobs in the code, as ``module:function``."""
    found = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("workers.")
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.AsyncFunctionDef) and any(map(_sleeps, _endless_loops(node))):
                    found.add(f"{module}:{node.name}")
    return found - RETRIES


def _endless_loops(function: ast.AsyncFunctionDef) -> Iterator[ast.While]:
    return (node for node in ast.walk(function) if isinstance(node, ast.While) and isinstance(node.test, ast.Constant))


def _sleeps(loop: ast.While) -> bool:
    bodies = [statement for statement in loop.body if isinstance(statement, ast.Expr)]
    return any(ast.unparse(statement).startswith("await anyio.sleep(") for statement in bodies)


class HastenedSleeps:
    """No sleep of a worker takes longer than `LONGEST_SECONDS`; ``passed`` counts them by job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed: Counter[str] = Counter()
        self._sleep = anyio.sleep
        monkeypatch.setattr(anyio, "sleep", self)

    def __call__(self, seconds: float) -> Coroutine[Any, Any, None]:
        caller = sys._getframe(1)
        self.passed[f"{caller.f_globals.get('__name__')}:{caller.f_code.co_name}"] += 1
        return self._sleep(min(seconds, LONGEST_SECONDS))
