"""Measures steps/s by the number of worker processes: environments and samplers that wait, so that cores do not decide.

    python benchmarks/scaling.py --json --processes 1,2,4,8

One real server, so many environment workers and as many inference workers, each a process with ``--slots`` episodes at a time.
A step of an environment takes ``--wait`` seconds and a generation as long, as if both were elsewhere. ``ideal`` is what these
waits allow, ``efficiency`` the steps/s relative to as many times those of the first number of processes. ``cores`` is the CPU
of all processes together, nats-server included, over the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import psutil
import structlog
import uvloop

from benchmarks.load_plan import LoadPlan, temporary_server
from benchmarks.step_loop import _play
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, PolicyPublished, Subjects, WorkerStarted, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference

RUN = "steploop"
STARTED_SECONDS = 120.0


class Load(NamedTuple):
    """Of each process: ``slots`` episodes at a time, of ``turns``, and ``wait`` seconds for whatever is elsewhere."""

    slots: int
    turns: int
    wait: float


class WaitingEnvironment(ScriptedEnvironment):
    wait = 0.0

    async def step(self, action: Action) -> Step:
        await anyio.sleep(self.wait)
        return await super().step(action)


async def serve(role: str, name: str, url: str, load: Load) -> None:
    """One worker process, until it is killed."""
    WaitingEnvironment.wait = load.wait
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    settings = Configuration(
        run=RunSettings(name=RUN),
        environment=EnvironmentSettings(slots=load.slots),
        inference=InferenceSettings(slots=2 * load.slots, max_model_len=1 << 20),
    )
    async with connect(url, run=RUN, role=role, worker=name) as bus:
        if role == "environment":
            await run_environment(bus, configuration=settings, name=name, drain=anyio.Event(), make=WaitingEnvironment)
        else:
            sampler = ScriptedSampler(delay=lambda _: load.wait)
            await run_inference(
                bus, configuration=settings, name=name, drain=anyio.Event(), sampler=sampler, template=ScriptedTemplate()
            )


@contextmanager
def worker_process(role: str, index: int, url: str, load: Load) -> Iterator[None]:
    command = [sys.executable, __file__, "--serve", role, "--name", f"{role}{index}", "--url", url]
    process = subprocess.Popen([*command, "--slots", str(load.slots), "--wait", str(load.wait)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure(processes: int, load: Load) -> dict[str, float]:
    """Steps per second with so many workers of each kind."""
    subjects = Subjects(RUN)
    async with temporary_server() as url, connect(url, run=RUN, role="up", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=processes + 1, max_bytes=2 << 30))
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(subjects.policy("default"), encode(policy))
        with ExitStack() as stack:
            for index in range(processes):
                for role in ("inference", "environment"):
                    stack.enter_context(worker_process(role, index, url, load))
            with anyio.fail_after(STARTED_SECONDS):
                await wait_until_started(bus, subjects, 2 * processes)
            await _play(bus, subjects, LoadPlan(processes * load.slots, 1), "warm")
            before, started = read_cpu_seconds(), time.perf_counter()
            await _play(bus, subjects, LoadPlan(processes * load.slots, load.turns), "step")
            wall = time.perf_counter() - started
            cores = (read_cpu_seconds() - before) / wall
    rate = processes * load.slots * load.turns / wall
    ideal = processes * load.slots / (2 * load.wait)
    return {"processes": processes, "sessions": processes * load.slots, "steps_per_second": round(rate, 1), "ideal": ideal,
            "cores": round(cores, 2)}  # fmt: skip


async def wait_until_started(bus: Bus, subjects: Subjects, workers: int) -> None:
    seen: set[str] = set()
    async with bus.read([subjects.life("*", "*")]) as reader:
        while len(seen) < workers:
            seen |= {started.worker for _, started in decode_entries(WorkerStarted, [await reader.receive()])}


def read_cpu_seconds() -> float:
    """Of this process and its children."""
    times = [time.process_time(), *(sum(child.cpu_times()[:2]) for child in psutil.Process().children())]
    return sum(times)


async def main(counts: list[int], load: Load, rounds: int, as_json: bool) -> None:
    """Rounds go through all counts in turn; of each count the round with the median rate is kept."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            found[count].append(await measure(count, load))
    first = 0.0
    for count in counts:
        row = sorted(found[count], key=lambda each: each["steps_per_second"])[rounds // 2]
        first = first or row["steps_per_second"] / count
        row |= {"efficiency": round(row["steps_per_second"] / (count * first), 3)}
        print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4,8", help="environment workers, and as many inference workers")
    parser.add_argument("--slots", type=int, default=128, help="episodes at a time, of each process")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds of a step, and of a generation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    for hidden in ("--serve", "--name", "--url"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = Load(options.slots, options.turns, options.wait)
    if options.serve:
        uvloop.run(serve(options.serve, options.name, options.url, load))
    else:
        counts = [int(each) for each in options.processes.split(",")]
        uvloop.run(main(counts, load, options.rounds, options.json))
