"""The fixtures of the pytest plugin: a declared in-memory run, and a replay outside of any event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.recording import Recording
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.report import Report
from fleetbus_workers.replay.run import replay_recording


@asynccontextmanager
async def memory_bus(run: str = "test", *, lanes: int = 4, server: MemoryServer | None = None) -> AsyncIterator[Bus]:
    """A declared run on an in-memory server; give ``server`` to connect several to the same one."""
    async with (server or MemoryServer()).connect(run, worker="test") as bus:
        await bus.declare(plan_run(run, lanes=lanes))
        yield bus


def replay_blocking(source: Recording | Path, **choices: Any) -> Report:
    """Replay in an event loop of its own; ``choices`` are those of `Replay`, with ``ignored`` as any collection of names."""
    choices["ignored"] = frozenset(choices.get("ignored", ()))
    for name in ("model", "weights"):
        if choices.get(name) is not None:
            choices[name] = Path(choices[name])
    replay = Replay(**choices)
    return run_async(replay_recording, source, replay)
