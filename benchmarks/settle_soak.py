"""Measures growth with a run's length: scripted episodes, session steps and a recorder on a real server with a log of 64 MiB.

    python benchmarks/settle_soak.py --count 1000000 --seconds 6000 --output docs/settle_soak.svg

Ends when both so many episodes were trained and so many session steps answered, or when the time is over. Samples the server's
memory, the log and the workers' memory; then audits archive and log, the deep check included, counting its open episodes and
its memory. Figures are of one process with all roles, beside one nats-server. Exit status 1 unless the audit balances.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog

from fleetbus.audit.run import enter
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
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.audit.books import Audit
from fleetbus.log.archive_reader import scan_archive_and_log
from fleetbus_schemas import Subjects, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.digest_audit import audit_digests
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder

RUN = "soak"
LOG_BYTES = 64 << 20
SAMPLES = 400
SESSIONS_AT_A_TIME = 8
STEPS_PER_SESSION = 50
S = Subjects(RUN)


def read_rss_mib(pid: int | str) -> float:
    """Resident memory of a process in MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def drive_sessions(bus: Bus, counts: dict[str, int], most: int) -> None:
    """Open, step and close sessions until so many steps were answered."""
    async with sessions(bus, S) as client, anyio.create_task_group() as group:

        async def drive() -> None:
            while counts["steps"] < most:
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


class CountingTrainer(ScriptedTrainer):
    """The scripted trainer with a count instead of its memory of what it was given."""

    episodes = 0

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        metrics = super().train(batch, version=version, progress=progress)
        self.episodes += len(self.trained)
        self.trained.clear()
        return metrics


def build_configuration(folder: Path, turns: int) -> Configuration:
    return Configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        nats=NatsSettings(lanes=4, max_bytes=LOG_BYTES),
        learner=LearnerSettings(steps=10**9, groups=64, group_size=4, checkpoint_every=1, keep_checkpoints=4),
        episode=EpisodeSettings(max_turns=turns),
        evaluation=EvaluationSettings(episodes=0),
        environment=EnvironmentSettings(slots=128, session_slots=SESSIONS_AT_A_TIME),
        inference=InferenceSettings(slots=128),
        limits=LimitSettings(drain=2),
    )


async def soak(folder: Path, count: int, seconds: float, settle_seconds: float, turns: int) -> dict[str, object]:
    """The samples and the audit's figures."""
    configuration = build_configuration(folder, turns)
    tasks = [Task(key=f"t{index}", prompt="p", config={"turns": turns}) for index in range(8)]
    trainer, counts = CountingTrainer(), {"steps": 0}
    samples: list[dict[str, float]] = []
    drain, recorded = anyio.Event(), anyio.Event()
    async with run_server(folder / "nats") as server:

        @asynccontextmanager
        async def open_bus(name: str) -> AsyncIterator[Bus]:
            async with connect(server.url, run=RUN, worker=name) as bus:
                yield bus

        async def play() -> None:
            async with open_bus("e") as bus:
                await run_environment(bus, configuration=configuration, name="e", drain=drain, make=ScriptedEnvironment)

        async def infer() -> None:
            sampler, template = ScriptedSampler(), ScriptedTemplate()
            async with open_bus("i") as bus:
                await run_inference(bus, configuration=configuration, name="i", drain=drain, sampler=sampler, template=template)

        async def train() -> None:
            curriculum = Curriculum(tasks, tasks, seed=1)
            async with open_bus("l") as bus:
                await run_learner(
                    bus, configuration=configuration, name="l", drain=drain, trainer=trainer, curriculum=curriculum
                )

        async def record() -> None:
            settings, archive = RecorderSettings(settle_seconds=settle_seconds, trim_seconds=2), folder / "archive"
            async with open_bus("r") as bus:
                await run_recorder(
                    bus, configuration=configuration, name="r", drain=recorded, folder=archive, settings=settings
                )

        async with open_bus("test") as bus, anyio.create_task_group() as group:
            await bus.declare(plan_run(RUN, lanes=4, max_bytes=LOG_BYTES, duplicate_window_seconds=settle_seconds))
            for work in (play, infer, train, record):
                group.start_soon(work)
            async with open_bus("client") as client, anyio.create_task_group() as driving:
                driving.start_soon(drive_sessions, client, counts, count)
                started, elapsed, done = time.monotonic(), 0.0, False
                while elapsed < seconds and not done:
                    await anyio.sleep(max(seconds / SAMPLES, 1.0))
                    elapsed, done = time.monotonic() - started, min(trainer.episodes, counts["steps"]) >= count
                    state = await bus.log_state()
                    sample = {
                        "seconds": round(elapsed, 1), "log_mib": round(state.used_bytes / 2**20, 2),
                        "entries": state.last_sequence,
                        "server_mib": round(read_rss_mib(server.pid), 1), "workers_mib": round(read_rss_mib("self"), 1),
                        "steps": counts["steps"], "episodes": trainer.episodes, "cpu": round(sum(os.times()[:4]), 1),
                    }  # fmt: skip
                    samples.append(sample)
                    print(json.dumps(sample), flush=True)
                driving.cancel_scope.cancel()
            drain.set()
            await anyio.sleep(5)
            recorded.set()
        async with open_bus("audit") as bus:
            return {"samples": samples, "session_steps": counts["steps"], **await audit(bus, folder / "archive")}


async def audit(bus: Bus, archive: Path) -> dict[str, object]:
    """Archive and log are read as `fleetbus audit --deep` does it."""
    audit, most, before = Audit(), 0, read_rss_mib("self")
    async for entry in scan_archive_and_log(bus, S, archive):
        enter(audit, entry)
        most = max(most, len(audit))
    report = audit.report()
    after = read_rss_mib("self")
    proof = await audit_digests(partial(scan_archive_and_log, bus, S, archive), last_sequence=report.last_sequence)
    return {
        "episodes": report.books.requested, "trained": report.books.trained, "proven": proof.proven,
        "findings": [finding.kind for finding in (*report.findings, *proof.findings)], "entries": report.entries,
        "refused": report.refused, "audit_most_open_episodes": most, "audit_mib": round(after - before, 1),
        "deep_audit_mib": round(read_rss_mib("self") - after, 1),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10**9, help="episodes, and steps of sessions, to end after")
    parser.add_argument("--seconds", type=float, default=300, help="to end after")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--settle-seconds", type=float, default=20)
    parser.add_argument("--folder", type=Path, help="empty, for the archive and the rest of the run: kept")
    parser.add_argument("--output", type=Path, help="plot of the samples, as SVG")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        limits = (arguments.count, arguments.seconds, arguments.settle_seconds, arguments.turns)
        found = anyio.run(soak, folder, *limits, backend_options={"use_uvloop": True})
    samples = found.pop("samples")
    if arguments.output:
        arguments.output.write_text(draw(samples))  # type: ignore[arg-type]
    print(json.dumps(found))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
