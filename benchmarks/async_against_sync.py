"""Bounded-staleness training beside the synchronous barrier: trained episodes per second, real workers, a real server.

    python benchmarks/async_against_sync.py --json

Both modes run the same learner, environment worker and inference worker in three processes; only ``max_staleness`` differs: 0
asks for a batch when the one before is trained, 4 lets that many more be out. Environment latency, token rate and training
time are fixed by the constants below. A mode is one run; after its warm-up its steps are cut into five windows, and the median
window counts. ``bound`` is what the latencies allow at most: a barrier that waits for the slowest of 128 episodes and then
trains, beside slots that are never idle; overheads of the workers and of the server are in neither.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
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
from fleetbus.episodes import decode_entries
from fleetbus_schemas import Action, LineageStarted, StepTrained, Subjects, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step, Verdict
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.journal import OTHER_ENTRIES
from fleetbus_workers.learner.scripted import ScriptedTrainer

TURNS = 3
GROUPS = 16
GROUP_SIZE = 8
SLOTS = 128
LATENCY_MEDIAN_SECONDS = 0.3
LATENCY_P99_FACTOR = 10.0
TOKENS_PER_TURN = 20
TOKENS_PER_SECOND = 200.0  # of one sequence; as many sequences as there are slots are decoded side by side
TRAINING_SECONDS = 1.0
STALENESS = {"sync": 0, "async": 4}
WINDOWS = 5
WARM_UP_STEPS = {"sync": 1, "async": 6}
WINDOW_STEPS = {"sync": 1, "async": 6}
SEED = 1

RUN = "asyncsync"
SIGMA = math.log(LATENCY_P99_FACTOR) / statistics.NormalDist().inv_cdf(0.99)
BATCH = GROUPS * GROUP_SIZE


class SlowEnvironment(ScriptedEnvironment):
    """Three turns, each after a log-normal latency; rewards are drawn, so that groups have a signal."""

    _draw = random.Random(SEED)

    async def step(self, action: Action) -> Step:
        await anyio.sleep(latency(self._draw))
        return await super().step(action)

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=float(self._draw.random() < 0.5))


class SlowTrainer(ScriptedTrainer):
    """Takes its time over every batch."""

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        time.sleep(TRAINING_SECONDS)
        return super().train(batch, version=version, progress=progress)


def latency(draw: random.Random) -> float:
    """Seconds of one environment step."""
    return draw.lognormvariate(math.log(LATENCY_MEDIAN_SECONDS), SIGMA)


def bound(samples: int = 2000) -> dict[str, float]:
    """Episodes per second that the latencies allow, by drawing ``samples`` batches."""
    draw, generating = random.Random(SEED), TURNS * TOKENS_PER_TURN / TOKENS_PER_SECOND
    slowest, mean = 0.0, 0.0
    for _ in range(samples):
        episodes = [sum(latency(draw) for _ in range(TURNS)) + generating for _ in range(BATCH)]
        slowest += max(episodes) / samples
        mean += statistics.fmean(episodes) / samples
    sync = BATCH / (slowest + TRAINING_SECONDS)
    unbarred = min(SLOTS / mean, BATCH / TRAINING_SECONDS)
    return {"sync": sync, "async": unbarred, "ratio": unbarred / sync}


def configuration(mode: str, folder: str) -> Configuration:
    return Configuration(
        run=RunSettings(name=RUN, folder=folder),
        episode=EpisodeSettings(max_tokens=TOKENS_PER_TURN, max_turns=TURNS, max_episode_tokens=1024),
        environment=EnvironmentSettings(slots=SLOTS),
        inference=InferenceSettings(slots=2 * SLOTS, max_model_len=1024),
        learner=LearnerSettings(
            steps=WARM_UP_STEPS[mode] + WINDOWS * WINDOW_STEPS[mode] + 1,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=STALENESS[mode],
            checkpoint_every=10**6,
        ),
        evaluation=EvaluationSettings(episodes=0),
    )


async def serve(role: str, mode: str, url: str, folder: str) -> None:
    """One worker process; it drains at the end of its standard input."""
    from fleetbus_workers.environment.worker import run_environment
    from fleetbus_workers.inference.worker import run_inference
    from fleetbus_workers.learner.worker import run_learner

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    drain, settings = anyio.Event(), configuration(mode, folder)
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
async def worker_process(role: str, mode: str, url: str, folder: str) -> AsyncIterator[None]:
    command = [sys.executable, __file__, "--serve", role, "--mode", mode, "--url", url, "--folder", folder]
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


async def measure(mode: str) -> dict[str, float | list[float]]:
    """Episodes per second of each window of one run, by the server's clock, and the staleness of what was trained."""
    settings, subjects = configuration(mode, "."), Subjects(RUN)
    steps: list[tuple[int, StepTrained]] = []
    async with temporary_server() as url:
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / RUN / "weights"
            weights.mkdir(parents=True)
            async with connect(url, run=RUN, role="test", worker="driver") as bus:
                await bus.declare(plan_run(RUN, lanes=2, max_bytes=4 << 30))
                async with (
                    worker_process("inference", mode, url, folder),
                    worker_process("environment", mode, url, folder),
                    worker_process("learner", mode, url, folder),
                    bus.read([subjects.train("default")]) as reader,
                ):
                    while len(steps) < settings.learner.steps:
                        entry = await reader.receive()
                        others = [kind for kind in OTHER_ENTRIES if kind is not StepTrained]
                        found = decode_entries(StepTrained, [entry], beside=(LineageStarted, *others))
                        steps += [(stored.time_ns, trained) for stored, trained in found]
    measured = steps[WARM_UP_STEPS[mode] :]
    width = WINDOW_STEPS[mode]
    rates = []
    for start in range(0, WINDOWS * width, width):
        window = measured[start : start + width + 1]
        rates.append(sum(len(step.episodes) for _, step in window[1:]) * 1e9 / (window[-1][0] - window[0][0]))
    lags = [step.metrics["staleness_mean"] for _, step in measured]
    return {
        "episodes_per_second": statistics.median(rates),
        "windows": [round(rate, 2) for rate in rates],
        "staleness_mean": statistics.fmean(lags),
        "staleness_max": max(step.metrics["staleness_max"] for _, step in measured),
        "discarded": float(sum(1 for _, step in measured for each in step.excluded if each.reason == "stale")),
    }


async def main(as_json: bool) -> None:
    measured = {}
    for mode in STALENESS:
        measured[mode] = await measure(mode)
        if not as_json:
            shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in measured[mode].items()}
            print(mode, *(f"{name} {value}" for name, value in shown.items()), sep="  ", flush=True)
    rates = {mode: found["episodes_per_second"] for mode, found in measured.items()}
    assert isinstance(rates["sync"], float) and isinstance(rates["async"], float)
    result = measured | {"ratio": rates["async"] / rates["sync"], "bound": bound()}
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print(f"ratio {result['ratio']:.2f}  bound", json.dumps({name: round(value, 2) for name, value in bound().items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    for hidden in ("--serve", "--mode", "--url", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.mode, options.url, options.folder))
    else:
        uvloop.run(main(options.json))
