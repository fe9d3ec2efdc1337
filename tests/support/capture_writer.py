"""A process that stores records of rollouts as it is told on its standard input, for tests that race it, or kill it.

``python -m tests.support.capture_writer URL RUN AUTH [--held] [--unfenced]``. Each line is a JSON list of rollout, calls and
bytes per record; the answer is one line, too, by call: ``kept`` or ``refused``. With ``begin`` as a fourth item each call is
said to go out before, and each of its steps is answered at once. ``--held`` says ``held`` before each entry and waits for a
line; ``--unfenced`` leaves out compare-and-set: a planted fault.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import anyio.to_thread

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.client.capture_log import CaptureClosed, CaptureLog


class Steered:
    """A bus that waits between what was read and what is said of it, or that stores whatever it is given."""

    def __init__(self, bus: Any, *, held: bool, unfenced: bool) -> None:
        self._bus = bus
        self._held = held
        self._unfenced = unfenced

    async def publish(self, subject: str, payload: bytes, *, expected_last: int | None = None, **options: Any) -> Any:
        if self._held and expected_last is not None:
            say("held")
            await anyio.to_thread.run_sync(sys.stdin.readline)
        return await self._bus.publish(subject, payload, expected_last=None if self._unfenced else expected_last, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


def build_record(call: str, size: int) -> bytes:
    """The same bytes in every process."""
    return (call.encode() * (size // len(call) + 1))[:size]


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


async def write(log: CaptureLog, rollout: str, calls: list[str], size: int, begins: bool) -> None:
    outcomes: dict[str, str] = {}

    async def put(call: str) -> None:
        try:
            if begins:
                await log.begin_call(rollout, call)
                say(f"begun {call}")
            await log.put(rollout, call, build_record(call, size))
            outcomes[call] = "kept"
        except CaptureClosed:
            outcomes[call] = "refused"

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(put, call)
    say(outcomes)


async def main(*arguments: str) -> None:
    url, run, auth, *flags = arguments
    async with connect(url, run=run, role="admin", worker="writer", **build_access("admin", auth, run)) as bus:
        steered: Any = Steered(bus, held="--held" in flags, unfenced="--unfenced" in flags)
        log = CaptureLog(steered, run)
        say("ready")
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            rollout, calls, size, *rest = json.loads(line)
            await write(log, rollout, calls, size, bool(rest))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
