"""Measures the growth of workers with their work: memory blocks, resident memory, tasks and descriptors of each role.

    python benchmarks/soak.py --seconds 120

A real server; learner, environment worker, inference worker and recorder, each in a process of its own, with scripted
environments, engine and trainer, so that many short episodes are played. Each process says every second how many memory blocks
its interpreter holds after a collection, and what the operating system says of it. The first ``WARM_UP`` of the time is left
out; over the rest the growth is that between the least of the first and the last quarter. A leak of one small object per
episode shows as one block per episode, long before resident memory tells.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import psutil
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    RunSettings,
)
from fleetbus_schemas import EpisodeFinished, Subjects, Task
from fleetbus_schemas.episode import AttemptReleased, AttemptStarted
from fleetbus_schemas.message import decode_any
from fleetbus_workers.learner.scripted import ScriptedTrainer

RUN = "soak"
ROLES = ("learner", "environment", "inference", "recorder")
WARM_UP = 0.4
"""Until queues, caches and thread pools have their size."""

MOST_BLOCKS = 0.1
"""Memory blocks per episode, as growth; 0.1 of some 64 bytes would be 64 MB after ten million episodes."""

NOISE_BLOCKS = 2000
"""What is under way at one moment and not at another: some hundred episodes, a batch, a segment of the archive."""

MOST_DESCRIPTORS = 2
MOST_TASKS = 16
"""As growth, whatever the episodes: tasks begin and end with them."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one moment; ``rss_kib`` is its resident memory."""

    seconds: float
    blocks: int
    tasks: int
    descriptors: int
    rss_kib: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One role over the counted part of a soak, in which ``episodes`` were played. Negative is shrinking."""

    role: str
    episodes: int
    blocks: float
    blocks_per_episode: float
    tasks: float
    descriptors: float
    rss_kib: float
    rss_mib_at_end: float

    @property
    def is_flat(self) -> bool:
        allowed_blocks = MOST_BLOCKS * self.episodes + NOISE_BLOCKS
        return self.blocks <= allowed_blocks and self.descriptors <= MOST_DESCRIPTORS and self.tasks <= MOST_TASKS


class ForgetfulTrainer(ScriptedTrainer):
    """The scripted trainer without its memory of what it was given."""

    def train(self, *arguments: object, **options: object) -> dict[str, float]:
        metrics = super().train(*arguments, **options)  # type: ignore[arg-type]
        self.trained.clear()
        return metrics


def configuration(folder: str) -> Configuration:
    return Configuration(
        run=RunSettings(name=RUN, folder=folder),
        environment=EnvironmentSettings(slots=32),
        inference=InferenceSettings(slots=64, max_model_len=1 << 16),
        learner=LearnerSettings(steps=10**6, groups=16, group_size=8, max_staleness=1, checkpoint_every=2),
        evaluation=EvaluationSettings(episodes=0),
    )


def build_work(role: str, folder: str) -> Callable[[Bus, anyio.Event], Awaitable[None]]:
    """The loop of one role."""
    settings = configuration(folder)
    if role == "environment":
        from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
        from fleetbus_workers.environment.worker import run_environment

        return lambda bus, drain: run_environment(bus, configuration=settings, name=role, drain=drain, make=ScriptedEnvironment)
    if role == "inference":
        from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
        from fleetbus_workers.inference.worker import run_inference

        return lambda bus, drain: run_inference(
            bus, configuration=settings, name=role, drain=drain, sampler=ScriptedSampler(), template=ScriptedTemplate()
        )
    if role == "recorder":
        from fleetbus_workers.recorder.worker import run_recorder

        return lambda bus, drain: run_recorder(
            bus, configuration=settings, name=role, drain=drain, folder=Path(folder) / "archive"
        )
    from fleetbus_workers.learner.curriculum import Curriculum
    from fleetbus_workers.learner.worker import run_learner

    tasks = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(64)]
    return lambda bus, drain: run_learner(
        bus,
        configuration=settings,
        name=role,
        drain=drain,
        trainer=ForgetfulTrainer(),
        curriculum=Curriculum(tasks, [], seed=1),
    )


async def serve(role: str, url: str, folder: str) -> None:
    """One worker's process, until it is killed; a line of figures every second."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    async with connect(url, run=RUN, role=role, worker=role) as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(report)
        await build_work(role, folder)(bus, anyio.Event())


async def report() -> None:
    process = psutil.Process()
    while True:
        await anyio.sleep(1)
        gc.collect()
        sample = Sample(
            seconds=anyio.current_time(),
            blocks=sys.getallocatedblocks(),
            tasks=len(asyncio.all_tasks()),
            descriptors=process.num_fds(),
            rss_kib=process.memory_info().rss // 1024,
        )
        print(json.dumps(msgspec.structs.asdict(sample)), flush=True)


async def count_results(bus: Bus, counted: list[int]) -> None:
    async with bus.read([Subjects(RUN).episodes]) as reader:
        while True:
            entry = await reader.receive()
            message = decode_any((EpisodeFinished, AttemptStarted, AttemptReleased), entry.payload, subject=entry.subject)
            counted[0] += isinstance(message, EpisodeFinished)


async def soak(url: str, folder: str, seconds: float) -> list[Growth]:
    """All roles for so long, and how each has grown."""
    counted = [0]
    async with connect(url, run=RUN, role="test", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=2, max_bytes=8 << 30, duplicate_window_seconds=10))
        with ExitStack() as stack:
            outputs = {role: stack.enter_context(tempfile.TemporaryFile()) for role in ROLES}
            processes = [start(role, url, folder, outputs[role], stack) for role in ROLES]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(count_results, bus, counted)
                await anyio.sleep(seconds * WARM_UP)
                begun, before = anyio.current_time(), counted[0]
                await anyio.sleep(seconds * (1 - WARM_UP))
                episodes = counted[0] - before
                tasks.cancel_scope.cancel()
            dead = [role for role, process in zip(ROLES, processes, strict=True) if process.poll() is not None]
            if dead:
                raise SystemExit(f"ended before the soak was over: {', '.join(dead)}")
            return [compute_growth(role, read_samples(outputs[role]), episodes, begun) for role in ROLES]


def start(role: str, url: str, folder: str, output: object, stack: ExitStack) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--serve", role, "--url", url, "--folder", folder]
    process = subprocess.Popen(command, stdout=output)  # type: ignore[call-overload]

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
    return process  # type: ignore[no-any-return]


def read_samples(output: object) -> list[Sample]:
    output.seek(0)  # type: ignore[attr-defined]
    lines = output.read().splitlines()  # type: ignore[attr-defined]
    return [msgspec.json.decode(line, type=Sample) for line in lines if line.endswith(b"}")]


def compute_growth(role: str, samples: list[Sample], episodes: int, begun: float) -> Growth:
    """What changed between the first and the last quarter of what is counted; episodes came evenly between their middles."""
    counted = [sample for sample in samples if sample.seconds >= begun]
    quarter = max(len(counted) // 4, 1)
    first, last = counted[:quarter], counted[-quarter:]

    def compute_change(field: str) -> float:
        before, after = (min(getattr(sample, field) for sample in part) for part in (first, last))
        return float(after - before)

    between = max(round(episodes * 0.75), 1)
    return Growth(
        role=role,
        episodes=between,
        blocks=compute_change("blocks"),
        blocks_per_episode=round(compute_change("blocks") / between, 4),
        tasks=round(compute_change("tasks"), 1),
        descriptors=round(compute_change("descriptors"), 1),
        rss_kib=round(compute_change("rss_kib")),
        rss_mib_at_end=round(counted[-1].rss_kib / 1024, 1),
    )


async def run(seconds: float) -> list[Growth]:
    with tempfile.TemporaryDirectory() as folder:
        async with temporary_server() as url:
            return await soak(url, folder, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.serve, arguments.url, arguments.folder))
        return 0
    compute_change = uvloop.run(run(arguments.seconds))
    if arguments.json:
        print(json.dumps([msgspec.structs.asdict(each) for each in compute_change]))
    else:
        for each in compute_change:
            print(
                f"{each.role:12} {each.episodes} episodes: {each.blocks_per_episode:+.4f} blocks each, "
                f"{each.rss_kib:+} KiB resident of {each.rss_mib_at_end} MiB, {each.descriptors:+} descriptors, "
                f"{each.tasks:+} tasks"
            )
    return 0 if all(each.is_flat for each in compute_change) else 1


if __name__ == "__main__":
    sys.exit(main())
