"""Measures recordings: export, replay against real time, the step loop with and without a recorder.

    python benchmarks/recording.py --json                       # export and step loop
    python benchmarks/recording.py --json --recording FILE      # and the replay of a recording, e.g. of a default run

Replay: each role in each of its ways, beside the time that the recording spans, or ``--real-seconds`` if it was made on a busy
machine. What no replay can undercut is measured in the same run: the bare forward passes over the tokens that are scored, the
training itself. Export: a log of ``--messages`` entries on a real nats-server, written compressed and redacted. Step loop: the
median of ``--repeats`` runs of `benchmarks/step_loop.py` each way, alternating, with `fleetbus record --follow` beside it. CPU
seconds, those of all processes below, are given beside wall seconds: on a machine that others use, the former are what a change
can be judged by.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import anyio

from benchmarks import step_loop
from benchmarks.load_plan import LoadPlan, temporary_server
from benchmarks.process_tree_cpu import TreeCpu
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.recording.export import Export
from fleetbus.recording.format import RecordingHeader, compute_message_schema
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import Action, ChatMessage, Observation, Subjects, VersionSpan, encode
from fleetbus_schemas.tokens import pack_ids, pack_logprobs
from fleetbus_workers.replay import Replay, replay_recording
from fleetbus_workers.replay.report import FORWARD, TRAINING

RUN = "bench"
EXPORT_BOUND, REPLAY_BOUND, COST_BOUND = 20_000, 20.0, 0.05
IN_FLIGHT = 256


def messages(number: int) -> list[tuple[str, bytes]]:
    """One turn of an episode: an observation of 0.5 KB, an action of 1 KB."""
    subjects, episode = Subjects(RUN), f"ep{number // 8}"
    observation = Observation(
        episode_id=episode,
        attempt=1,
        turn=number % 8,
        policy="default",
        messages=(ChatMessage(role="user", content=f"Tool result {number}: " + "some words of a tool " * 15),),
        tokens_left=900,
        environment_lane="e0",
        deadline_ns=1 << 60,
    )
    action = Action(
        episode_id=episode,
        attempt=1,
        turn=number % 8,
        text="an answer with a call " * 8,
        prompt_delta=pack_ids((number * 7 + index * 31) % 50_000 for index in range(60)),
        sampled=pack_ids((number * 13 + index * 17) % 50_000 for index in range(60)),
        logprobs=pack_logprobs([-0.01 * (index % 50) for index in range(60)]),
        versions=(VersionSpan(version=1, start=0, stop=60),),
    )
    return [
        (subjects.observation("default", "any", episode), encode(observation)),
        (subjects.action("e0", episode), encode(action)),
    ]


async def measure_export(count: int, folder: Path) -> dict[str, Any]:
    """Messages per second out of a nats-server into a compressed, redacted file."""
    async with run_server(folder / "nats") as server, connect(server.url, run=RUN, role="bench") as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
        limiter = anyio.CapacityLimiter(IN_FLIGHT)

        async def publish(subject: str, payload: bytes) -> None:
            async with limiter:
                await bus.publish(subject, payload)

        for start in range(0, count // 2, 1000):
            async with anyio.create_task_group() as group:
                for number in range(start, min(start + 1000, count // 2)):
                    for subject, payload in messages(number):
                        group.start_soon(publish, subject, payload)
        file = folder / "export.fbrec"
        began, cpu = time.perf_counter(), time.process_time()
        with create_recording(file, RecordingHeader(run=RUN, messages=compute_message_schema())) as writer:
            await Export(writer, redactor=Redactor()).copy(bus.scan([Subjects(RUN).log]))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        used = (await bus.log_state()).used_bytes
        return {
            "messages": writer.entries,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu, 3),
            "messages_per_second": round(writer.entries / seconds),
            "messages_per_cpu_second": round(writer.entries / cpu),
            "log_bytes": used,
            "file_bytes": file.stat().st_size,
        }


WAYS: dict[str, dict[str, Any]] = {
    "environment": {"role": "environment"},
    "environment, one process": {"role": "environment", "jobs": 1},
    "environment, distinct episodes": {"role": "environment", "distinct": True},
    "inference": {"role": "inference"},
    "inference, one process": {"role": "inference", "jobs": 1},
    "inference, sampled again": {"role": "inference", "jobs": 1, "sample_again": True},
    "learner, until batches": {"role": "learner", "until": "batches"},
    "learner": {"role": "learner"},
}
BOUNDS = {"inference, one process": FORWARD, "learner": TRAINING}
"""The part of a way's work that a replay cannot do without."""


async def measure_replay(file: Path, real_seconds: float | None, ways: Sequence[str]) -> dict[str, Any]:
    """How many times faster than real time each way of replaying is, and how much longer than its bare arithmetic."""
    found: dict[str, Any] = {}
    for way in ways:
        with TreeCpu() as cpu:
            report = await replay_recording(file, Replay(**WAYS[way]))
        real = real_seconds or report.recorded_seconds
        found[way] = {
            "same": report.same,
            "jobs": report.jobs,
            "compared": dict(report.compared),
            "checked": report.checked,
            "real_seconds": round(real, 1),
            "seconds": round(report.seconds, 2),
            "cpu_seconds": round(cpu.seconds, 2),
            "speed": round(real / report.seconds, 1),
            "speed_per_cpu": round(real / cpu.seconds, 1),
            "measured": {what: round(seconds, 2) for what, seconds in report.measured.items()},
            "first": report.first.lines() if report.first else [],
        }
        if bare := report.measured.get(BOUNDS.get(way, "")):
            found[way] |= {"bare_seconds": round(bare, 2), "times_bare": round(report.seconds / bare, 2)}
    return found


async def measure_cost(sessions: int, turns: int, repeats: int) -> dict[str, Any]:
    """Steps per second of the step loop, alternately without and with a recorder that follows it."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(repeats):
        for way in rates:
            rates[way].append(await _step_loop(LoadPlan(sessions, turns), recorded=way == "with"))
    plain, recorded = statistics.median(rates["without"]), statistics.median(rates["with"])
    return {"sessions": sessions, "turns": turns, "steps_per_second": rates, "cost": round(1 - recorded / plain, 4)}


async def _step_loop(plan: LoadPlan, *, recorded: bool) -> float:
    """Scripted workers on a nats-server of their own; with ``recorded``, a recorder process follows the log."""
    async with temporary_server() as url:
        with tempfile.TemporaryDirectory(prefix="fleetbus-bench-") as place:
            async with connect(url, run=step_loop.RUN, role="bench") as bus:
                await bus.declare(plan_run(step_loop.RUN, lanes=2, max_bytes=2 << 30))
            file = Path(place) / "live.fbrec"
            recorder = _recorder(url, file) if recorded else None
            try:
                if recorder is not None:
                    await _until_written(file)
                measured = await step_loop.measure(url, plan, Path(place) / "report.json")
            finally:
                if recorder is not None:
                    recorder.send_signal(signal.SIGTERM)
                    await anyio.to_thread.run_sync(recorder.wait, 60)
            return measured["steps_per_second"]


async def _until_written(file: Path) -> None:
    while not file.is_file():  # noqa: ASYNC110, ASYNC240
        await anyio.sleep(0.05)


def _recorder(url: str, file: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "fleetbus_workers.cli",
        "record",
        step_loop.RUN,
        "--nats",
        url,
        "--follow",
        "-o",
        str(file),
    ]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=100_000, help="of the export; 0: none")
    parser.add_argument("--recording", type=Path, help="replay this recording with all roles, too")
    parser.add_argument("--real-seconds", type=float, help="what the recorded run takes on this machine when nothing else runs")
    parser.add_argument("--way", action="append", choices=WAYS, help="replay in this way only; may be given several times")
    parser.add_argument("--sessions", type=int, default=64, help="of each step loop; 0: none")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"load": os.getloadavg()[0]}
    if arguments.messages:
        with tempfile.TemporaryDirectory(prefix="fleetbus-bench-") as place:
            facts["export"] = run(partial(measure_export, arguments.messages, Path(place)))
    if arguments.sessions:
        facts["step_loop"] = run(partial(measure_cost, arguments.sessions, arguments.turns, arguments.repeats))
    if arguments.recording:
        facts["replay"] = run(partial(measure_replay, arguments.recording, arguments.real_seconds, arguments.way or list(WAYS)))
    facts["bounds"] = {"export": EXPORT_BOUND, "replay": REPLAY_BOUND, "cost": COST_BOUND}
    print(json.dumps(facts, indent=None if arguments.json else 2))


def run(function: Any) -> Any:
    return anyio.run(function, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
