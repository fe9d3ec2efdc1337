"""Measures what grows with the length of a run: the time to start a learner, rebuild an episode, audit, open `top` or the page.

    python benchmarks/run_length.py --json --episodes 10000,100000,300000

A real server; the entries of whole episodes (request, claim, two turns, result) in batches of 128, with a version per batch and
a checkpoint every ten, are written into the log as fast as it takes them, without workers and without a recorder, so that
nothing ever leaves it. After so many episodes each of these is timed, the median of three unless one takes seconds:

``learner``: what a learner reads until its first request, in three parts: ``book``, the learner's own entries since the run
began; ``versions``, those published; ``requests``, the requests since the floor of its newest checkpoint.
``episode``: one from the middle of the run, its claim and its token history, as a worker that takes it over rebuilds it.
``overview``: what `top` and the page read before they show a run; ``whole``: until they count all of its episodes, which
`top --once` waits for. ``audit``: what `fleetbus audit` does, with ``--state``; ``continued``: the next one, a batch later.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.log.episodes import read_episode_state, read_turns
from fleetbus_schemas import Message, encode
from fleetbus_workers.learner.resume import read_book, read_published_versions, read_requests_from_floor
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from tests.support.log_builder import SUBJECTS, LogBuilder

BATCH = 128
CHECKPOINT_STEPS = 10
ACKS = "written"
REPEATS = 3
LONG_MS = 5000.0


class LogWriter(LogBuilder):
    """A log that is written to a server instead of kept: the stream has no other author, so that sequences are known."""

    def __init__(self, url: str) -> None:
        super().__init__()
        host, port = url.removeprefix("nats://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %s 1\r\n' % ACKS.encode())
        self._waiting = bytearray()
        self._received = b""
        self._acked = 0
        self.last = self.floor = 0
        self.episodes = self.steps = 0

    def add(self, subject: str, message: Message) -> int:
        payload = encode(message)
        self._waiting += f"PUB {subject} {ACKS} {len(payload)}\r\n".encode() + payload + b"\r\n"
        self.last += 1
        if len(self._waiting) > 1 << 16:
            self.flush(within=4000)
        return self.last

    def flush(self, within: int = 0) -> None:
        """Send what waits, and wait until all but so many are stored."""
        self._socket.sendall(self._waiting)
        self._waiting.clear()
        while self.last - self._acked > within:
            received = self._socket.recv(1 << 18)
            self._received += received
            if not received or b'"error"' in self._received:
                raise SystemExit(f"refused, or the server is gone: {self._received[-400:]!r}")
            self._acked += self._received.count(b'"seq":')
            self._received = self._received[-5:]

    def write_batch(self) -> None:
        names = [f"{self.episodes + index:08d}" for index in range(BATCH)]
        for name in names:
            self.play(name)
        self.episodes += BATCH
        self.steps += 1
        self.step(self.steps, names)
        self.version(self.steps)
        if self.steps % CHECKPOINT_STEPS == 0:
            self.floor = self.last + 1
            self.checkpoint(self.steps, floor=self.floor)


async def time_reading(name: str, work: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Milliseconds of time, and of this process's CPU; medians."""
    took, used = [], []
    for _ in range(REPEATS):
        started, spent = time.perf_counter(), time.process_time()
        await work()
        took.append((time.perf_counter() - started) * 1e3)
        used.append((time.process_time() - spent) * 1e3)
        if took[0] > LONG_MS:
            break
    return {f"{name}_ms": round(statistics.median(took), 1), f"{name}_cpu_ms": round(statistics.median(used), 1)}


async def open_overview(bus: Bus, log: LogWriter, *, whole: bool) -> None:
    """Until the newest entry is in the fold; ``whole``: until every one is."""
    observer = RunObserver(bus, SUBJECTS, RunState(0), recent_first=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer.run)
        while observer.health.followed < log.last or not (observer.is_whole or not whole):  # noqa: ASYNC110
            await anyio.sleep(0.005)  # it reads for seconds, and says nothing when it has caught up
        tasks.cancel_scope.cancel()
    state = observer.state
    assert state.training.steps[-1].step == log.steps, "it shows the newest step"
    assert not whole or state.progress.episodes == log.episodes, "it counts them all"


async def measure(bus: Bus, log: LogWriter, state: Path) -> dict[str, Any]:
    resume_point: Any = SimpleNamespace(floor=log.floor)
    middle = f"{log.episodes // 2:08d}"

    async def rebuild_episode() -> None:
        state = await read_episode_state(bus, SUBJECTS, middle)
        assert len(await read_turns(bus, SUBJECTS, middle, state)) == 2

    async def audit() -> None:
        report = await audit_run(bus, SUBJECTS, state=state)
        assert report.balanced and report.books.trained == log.episodes, report

    async def audit_whole() -> None:
        await anyio.Path(state).unlink(missing_ok=True)
        await audit()

    async def audit_next() -> None:
        log.write_batch()
        log.flush()
        await audit()

    log.flush()  # the last entry is of interest to an overview, so that it is known to have read to the end
    return {
        "episodes": log.episodes,
        "entries": (await bus.log_state()).last_sequence,
        "log_mib": round((await bus.log_state()).used_bytes / 2**20, 1),
        **await time_reading("learner_book", lambda: read_book(bus, SUBJECTS, "default")),
        **await time_reading("learner_versions", lambda: read_published_versions(bus, SUBJECTS, "default")),
        **await time_reading(
            "learner_requests", lambda: read_requests_from_floor(bus, SUBJECTS, "default", ["default"], resume_point)
        ),
        **await time_reading("episode", rebuild_episode),
        **await time_reading("overview", lambda: open_overview(bus, log, whole=False)),
        **await time_reading("whole", lambda: open_overview(bus, log, whole=True)),
        **await time_reading("audit", audit_whole),
        **await time_reading("continued", audit_next),
        "state_mib": round((await anyio.Path(state).stat()).st_size / 2**20, 1),
    }


async def main(lengths: list[int], as_json: bool, folder: Path) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    async with temporary_server() as url, connect(url, run=SUBJECTS.run, role="up") as bus:
        await bus.declare(plan_run(SUBJECTS.run, lanes=2, max_bytes=8 << 30))
        log = LogWriter(url)
        log.lineage()
        log.version()
        for length in lengths:
            while log.episodes < length:
                log.write_batch()
            row = await measure(bus, log, folder / "state")
            print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", default="10000,30000,100000,300000", help="lengths at which it is measured")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        uvloop.run(main([int(each) for each in options.episodes.split(",")], options.json, Path(folder)))
