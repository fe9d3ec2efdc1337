"""What grows with the length of a run: scripted episodes, session steps and a recorder on a real server with a log of 64 MiB.

    python benchmarks/settle_soak.py --seconds 600 --output docs/settle_soak.svg

Samples the server's memory, the log and the workers' memory; audits archive and log at the end, counting its open episodes.
Figures are of one process with all roles, beside one nats-server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import structlog

from fleetbus.archive import scan_archive_and_log
from fleetbus.audit import enter
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.client.sessions import SessionUnavailable, sessions
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.audit import Audit
from fleetbus_schemas import Subjects, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder

RUN = "soak"
LOG_BYTES = 64 << 20
SAMPLE_SECONDS = 5.0
SESSIONS_AT_A_TIME = 4
STEPS_PER_SESSION = 50
S = Subjects(RUN)


def read_rss_mib(pid: int | str) -> float:
    """Resident memory of a process in MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def drive_sessions(bus: Bus, counts: dict[str, int]) -> None:
    """Open, step and close sessions for ever."""
    async with sessions(bus, S) as client, anyio.create_task_group() as group:

        async def drive() -> None:
            while True:
                try:
                    async with client.open(Task(key="t", config={"turns": STEPS_PER_SESSION + 1})) as session:
                        await session.reset()
                        for _ in range(STEPS_PER_SESSION):
                            await session.step("x")
                            counts["steps"] += 1
                except SessionUnavailable:
                    continue

        for _ in range(SESSIONS_AT_A_TIME):
            group.start_soon(drive)


async def soak(folder: Path, seconds: float, settle_seconds: float) -> dict[str, object]:
    """The samples and the audit's figures."""
    configuration = Configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        nats=NatsSettings(lanes=4, max_bytes=LOG_BYTES),
        learner=LearnerSettings(steps=10**9, groups=16, group_size=4, checkpoint_every=1, keep_checkpoints=4),
        episode=EpisodeSettings(max_turns=2),
        evaluation=EvaluationSettings(episodes=0),
        environment=EnvironmentSettings(slots=128, session_slots=8),
        limits=LimitSettings(drain=2),
    )
    tasks = [Task(key=f"t{index}", prompt="p", config={"turns": 2}) for index in range(8)]
    counts = {"steps": 0}
    samples: list[dict[str, float]] = []
    drain, recorded = anyio.Event(), anyio.Event()
    async with run_server(folder / "nats") as server:
        url = server.url

        async def play(name: str) -> None:
            async with connect(url, run=RUN, worker=name) as bus:
                await run_environment(bus, configuration=configuration, name=name, drain=drain, make=ScriptedEnvironment)

        async def infer() -> None:
            async with connect(url, run=RUN, worker="i") as bus:
                await run_inference(
                    bus,
                    configuration=configuration,
                    name="i",
                    drain=drain,
                    sampler=ScriptedSampler(),
                    template=ScriptedTemplate(),
                )

        async def train() -> None:
            async with connect(url, run=RUN, worker="l") as bus:
                await run_learner(
                    bus, configuration=configuration, name="l", drain=drain, trainer=ScriptedTrainer(),
                    curriculum=Curriculum(tasks, tasks, seed=1),
                )  # fmt: skip

        async def record() -> None:
            settings = RecorderSettings(settle_seconds=settle_seconds, trim_seconds=2)
            async with connect(url, run=RUN, worker="r") as bus:
                await run_recorder(
                    bus, configuration=configuration, name="r", drain=recorded, folder=folder / "archive", settings=settings
                )

        async with connect(url, run=RUN, worker="test") as bus, anyio.create_task_group() as group:
            await bus.declare(plan_run(RUN, lanes=4, max_bytes=LOG_BYTES, duplicate_window_seconds=settle_seconds))
            for work in (partial(play, "e"), infer, train, record):
                group.start_soon(work)
            async with connect(url, run=RUN, worker="client") as client, anyio.create_task_group() as driving:
                driving.start_soon(drive_sessions, client, counts)
                started = time.monotonic()
                while (elapsed := time.monotonic() - started) < seconds:
                    used, _ = await bus.usage()
                    last = await bus.last_sequence()
                    sample = {
                        "seconds": round(elapsed, 1), "log_mib": round(used / 2**20, 2), "entries": last,
                        "server_mib": round(read_rss_mib(server.pid), 1), "workers_mib": round(read_rss_mib("self"), 1),
                        "steps": counts["steps"],
                    }  # fmt: skip
                    samples.append(sample)
                    print(json.dumps(sample), flush=True)
                    await anyio.sleep(SAMPLE_SECONDS)
                driving.cancel_scope.cancel()
            drain.set()
            await anyio.sleep(5)
            recorded.set()
        async with connect(url, run=RUN, worker="audit") as bus:
            audit, most = Audit(), 0
            async for entry in scan_archive_and_log(bus, S, folder / "archive"):
                enter(audit, entry)
                most = max(most, len(audit))
            report = audit.report()
    books = report.books
    return {
        "samples": samples, "episodes": books.requested, "trained": books.trained, "session_steps": counts["steps"],
        "entries": report.entries, "findings": [finding.kind for finding in report.findings], "refused": report.refused,
        "audit_most_open_episodes": most,
    }  # fmt: skip


def draw(samples: list[dict[str, float]]) -> str:
    """One line per quantity over time, as SVG; each is drawn relative to its highest value, which stands beside it."""
    width, height, left = 640, 300, 60
    quantities = [("log_mib", "#1b6ca8", "log, MiB"), ("server_mib", "#b5541c", "server, MiB"),
                  ("workers_mib", "#3b7d3b", "workers, MiB"), ("entries", "#777777", "entries stored")]  # fmt: skip
    end = samples[-1]["seconds"] or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 190} {height + 50}" font-family="sans-serif">'
    ]
    parts.append(f'<rect x="{left}" y="10" width="{width}" height="{height}" fill="none" stroke="#ccc"/>')
    for row, (name, colour, label) in enumerate(quantities):
        highest = max(sample[name] for sample in samples) or 1.0
        points = " ".join(
            f"{left + width * sample['seconds'] / end:.1f},{10 + height * (1 - sample[name] / highest):.1f}"
            for sample in samples
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        text = f"{label}: at most {highest:,.0f}"
        parts.append(f'<text x="{left + width + 8}" y="{30 + 20 * row}" font-size="12" fill="{colour}">{text}</text>')
    parts.append(f'<text x="{left}" y="{height + 30}" font-size="12">0 s</text>')
    parts.append(f'<text x="{left + width - 40}" y="{height + 30}" font-size="12">{end:.0f} s</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--settle-seconds", type=float, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder:
        found = anyio.run(soak, Path(folder), arguments.seconds, arguments.settle_seconds, backend_options={"use_uvloop": True})
    samples = found.pop("samples")
    if arguments.output:
        arguments.output.write_text(draw(samples))  # type: ignore[arg-type]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
