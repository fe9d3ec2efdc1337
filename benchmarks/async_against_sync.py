"""Measures asynchrony with tool calls as slow as real ones: synchronous training beside staleness bounds of 1, 2, 4 and 8.

    python benchmarks/async_against_sync.py --json
    python benchmarks/async_against_sync.py --json --train 40      # `fleetbus up` on the default task, to see what it learns

The same learner, environment worker and inference worker run in three processes; only ``max_staleness`` differs: 0 asks for a
batch when the one before is trained, 4 lets that many more be out. Nobody gets more slots for it. Tool calls take what
`tool_latencies.py` draws, token rate and training time are the constants below. Each bound is one run; after its warm-up its
steps are cut into five windows, and the median window counts. ``possible`` is what the latencies allow at most: a barrier that
waits for the slowest of 128 episodes and then trains, beside slots that are never idle; the overheads of workers and server are
in neither.

``--train STEPS`` trains the starter policy on the warehouse instead, whose tools are as slow, with as many slots: held-out
success at the end, sampled and greedy, and seconds from the first step to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import anyio
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from benchmarks.tool_latencies import draw_latency
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    RunSettings,
)
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, StepTrained, Subjects, Task
from fleetbus_schemas.channels import STORED
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step, Verdict
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer

TURNS = 3
GROUPS = 16
GROUP_SIZE = 8
SLOTS = 128
TOKENS_PER_TURN = 20
TOKENS_PER_SECOND = 200.0  # of one sequence; as many sequences as there are slots are decoded side by side
TRAINING_SECONDS = 1.0
WINDOWS = 5
SEED = 1

RUN = "asyncsync"
BATCH = GROUPS * GROUP_SIZE


def window_steps(staleness: int) -> int:
    """Steps of a window: long enough that what is under way at its ends does not decide."""
    return 3 if staleness else 2


def warm_up_steps(staleness: int) -> int:
    """The batches that were asked for before the first was trained, and one."""
    return staleness + 2 if staleness else 1


class SlowEnvironment(ScriptedEnvironment):
    """Three turns, each after a slow tool call; rewards are drawn, so that groups have a signal."""

    _draw = random.Random(SEED)

    async def step(self, action: Action) -> Step:
        await anyio.sleep(draw_latency(self._draw))
        return await super().step(action)

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=float(self._draw.random() < 0.5))


class SlowTrainer(ScriptedTrainer):
    """Takes its time over every batch."""

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        time.sleep(TRAINING_SECONDS)
        return super().train(batch, version=version, progress=progress)


def compute_possible(samples: int = 2000) -> dict[str, float]:
    """Episodes per second that the latencies allow, by drawing ``samples`` batches: with a barrier, and without any."""
    draw, generating = random.Random(SEED), TURNS * TOKENS_PER_TURN / TOKENS_PER_SECOND
    slowest, mean = 0.0, 0.0
    for _ in range(samples):
        episodes = [sum(draw_latency(draw) for _ in range(TURNS)) + generating for _ in range(BATCH)]
        slowest += max(episodes) / samples
        mean += statistics.fmean(episodes) / samples
    return {"barrier": BATCH / (slowest + TRAINING_SECONDS), "unbarred": min(SLOTS / mean, BATCH / TRAINING_SECONDS)}


def configuration(staleness: int, folder: str) -> Configuration:
    return Configuration(
        run=RunSettings(name=RUN, folder=folder),
        episode=EpisodeSettings(max_tokens=TOKENS_PER_TURN, max_turns=TURNS, max_episode_tokens=1024),
        environment=EnvironmentSettings(slots=SLOTS),
        inference=InferenceSettings(slots=2 * SLOTS, max_model_len=1024),
        learner=LearnerSettings(
            steps=warm_up_steps(staleness) + WINDOWS * window_steps(staleness) + 1,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=staleness,
            checkpoint_every=10**6,
        ),
        evaluation=EvaluationSettings(episodes=0),
    )


async def serve(role: str, staleness: int, url: str, folder: str) -> None:
    """One worker process; it drains at the end of its standard input."""
    from fleetbus_workers.environment.worker import run_environment
    from fleetbus_workers.inference.worker import run_inference
    from fleetbus_workers.learner.worker import run_learner

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    drain, settings = anyio.Event(), configuration(staleness, folder)
    async with connect(url, run=RUN, role=role, worker=role) as bus, anyio.create_task_group() as group:
        group.start_soon(_drain_at_end_of_input, drain)
        if role == "environment":
            await run_environment(bus, configuration=settings, name=role, drain=drain, make=SlowEnvironment)
        elif role == "inference":
            sampler = ScriptedSampler(tokens=TOKENS_PER_TURN, delay=lambda request: request.max_tokens / TOKENS_PER_SECOND)
            await run_inference(
                bus, configuration=settings, name=role, drain=drain, sampler=sampler, template=ScriptedTemplate()
            )
        else:
            curriculum = Curriculum([Task(key=f"t{index}", config={"turns": TURNS}) for index in range(64)], [], seed=SEED)
            await run_learner(bus, configuration=settings, name=role, drain=drain, trainer=SlowTrainer(), curriculum=curriculum)
        group.cancel_scope.cancel()


async def _drain_at_end_of_input(drain: anyio.Event) -> None:
    await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    drain.set()


@asynccontextmanager
async def worker_process(role: str, staleness: int, url: str, folder: str) -> AsyncIterator[None]:
    command = [sys.executable, __file__, "--serve", role, "--staleness", str(staleness), "--url", url, "--folder", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
        assert process.stdin is not None
        process.stdin.close()
        with anyio.move_on_after(30):
            await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    finally:
        process.kill()
        process.wait()


async def measure(staleness: int) -> dict[str, Any]:
    """Episodes per second of each window of one run, by the server's clock, and the staleness of what was trained."""
    settings, subjects = configuration(staleness, "."), Subjects(RUN)
    steps: list[tuple[int, StepTrained]] = []
    async with temporary_server() as url:
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / RUN / "weights"
            weights.mkdir(parents=True)
            async with connect(url, run=RUN, role="test", worker="driver") as bus:
                await bus.declare(plan_run(RUN, lanes=2, max_bytes=4 << 30))
                async with (
                    worker_process("inference", staleness, url, folder),
                    worker_process("environment", staleness, url, folder),
                    worker_process("learner", staleness, url, folder),
                    bus.read([subjects.train("default")]) as reader,
                ):
                    while len(steps) < settings.learner.steps:
                        entry = await reader.receive()
                        found = decode_entries(StepTrained, [entry], beside=STORED["train"])
                        steps += [(stored.time_ns, trained) for stored, trained in found]
    measured = steps[warm_up_steps(staleness) :]
    width = window_steps(staleness)
    rates = []
    for start in range(0, WINDOWS * width, width):
        window = measured[start : start + width + 1]
        rates.append(sum(len(step.episodes) for _, step in window[1:]) * 1e9 / (window[-1][0] - window[0][0]))
    lags = [step.metrics["staleness_mean"] for _, step in measured]
    return {
        "staleness": staleness,
        "episodes_per_second": round(statistics.median(rates), 2),
        "windows": [round(rate, 2) for rate in rates],
        "staleness_mean": round(statistics.fmean(lags), 2),
        "staleness_max": max(step.metrics["staleness_max"] for _, step in measured),
        "trained": sum(len(step.episodes) for _, step in measured),
        "too_stale": sum(1 for _, step in measured for each in step.excluded if each.reason == "stale"),
    }


def train(staleness: int, steps: int, seed: int) -> dict[str, Any]:
    """`fleetbus up` on the warehouse with slow tools, from the starter policy."""
    options = ["--environment", "mcp:benchmarks.tool_latencies:serve_task", "--environment-prompt", "compact"]
    options += [
        "--learner-max-staleness",
        str(staleness),
        "--environment-slots",
        str(SLOTS),
        "--inference-slots",
        str(2 * SLOTS),
    ]
    options += ["--steps", str(steps), "--seed", str(seed), "--no-monitor", "--no-check"]
    paths = os.pathsep.join(str(ROOT / each) for each in (".", "workers", "schemas"))
    with tempfile.TemporaryDirectory(prefix="fleetbus-staleness-") as folder:
        command = [sys.executable, "-m", "fleetbus", "up", "--json-summary", "summary.json", *options]
        done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        summary = json.loads((Path(folder) / "summary.json").read_text())
    kept = ("success_start", "success_end", "success_end_greedy", "episodes_trained", "max_staleness_seen", "wall_seconds")
    stages = {f"seconds_{name}": summary["seconds_by_stage"].get(name) for name in ("wait", "train")}
    excluded = summary["episodes_excluded"]
    return {"staleness": staleness, "steps": steps, "seed": seed, **{name: summary[name] for name in kept}, **stages} | {
        "excluded": excluded, "success_by_step": summary["success_by_step"]
    }  # fmt: skip


async def main(bounds: list[int], *, steps: int, seed: int, as_json: bool) -> None:
    barrier = 0.0
    for staleness in bounds:
        row = train(staleness, steps, seed) if steps else await measure(staleness)
        if not steps:
            barrier = barrier or row["episodes_per_second"]
            possible = compute_possible()
            row |= {"ratio": round(row["episodes_per_second"] / barrier, 2)}
            row |= {"possible": round(possible["unbarred" if staleness else "barrier"], 2)}
        print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--staleness", default="0,1,2,4,8", help="bounds; ratios are relative to the first")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train the starter policy instead, so many steps")
    parser.add_argument("--seed", type=int, default=1, help="of --train")
    for hidden in ("--serve", "--url", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    bounds = [int(each) for each in options.staleness.split(",")]
    if options.serve:
        uvloop.run(serve(options.serve, bounds[0], options.url, options.folder))
    else:
        uvloop.run(main(bounds, steps=options.train, seed=options.seed, as_json=options.json))
