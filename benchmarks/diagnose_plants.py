"""Trains real runs in one process, most with one fault planted at a known step, and holds against it what `diagnose` says.

    python benchmarks/diagnose_plants.py --folder logs --healthy 10          # ten seeds without a fault
    python benchmarks/diagnose_plants.py --folder logs --plants old_weights learning_rate
    python benchmarks/diagnose_plants.py --folder logs --read                # nothing is trained: recordings are read again

Real are the learner with the torch trainer, the torch engine with the starter policy, the warehouse environment and the bus in
memory; planted is what a class of `benchmarks.training_plants` does. Each run is recorded as ``PLANT-SEED.fbrec``, its
token records are in ``PLANT-SEED.tokens``. Printed is one JSON line per run: the findings with their steps, and for a plant if
the right one is among them with its step within 2.
Exit status 1: a plant was missed, or a healthy run has a finding.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import anyio
import structlog

from benchmarks.training_plants import PLANTS, Plant, PlantedEnvironment
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import StepTrained, Subjects
from fleetbus_workers.assembly.environments import open_environments
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.assembly.trainers import build_trainer_settings
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.store import get_object_store

RUN = "plants"
GROUPS, GROUP_SIZE = 6, 8
TOLERANCE = 2
LIMIT_SECONDS = 900


class PlantedTrainer(TorchTrainer):
    def __init__(self, plant: Plant, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._plant = plant

    def train(self, batch: Any, *, version: int, progress: float) -> dict[str, float]:
        self._plant.change_trainer(self)
        return super().train(batch, version=version, progress=progress)


def configure(plant: Plant, folder: str, steps: int) -> Configuration:
    learner = {"steps": steps, "groups": GROUPS, "group_size": GROUP_SIZE, "keep_weights": steps + 2} | plant.learner
    return Configuration(
        run=RunSettings(name=RUN, folder=folder, seed=plant.seed),
        nats=NatsSettings(lanes=4, max_bytes=1 << 30),
        environment=EnvironmentSettings(slots=48),
        inference=InferenceSettings(slots=48, max_model_len=1024),
        learner=LearnerSettings(**learner),
        evaluation=EvaluationSettings(episodes=0),
    )


@asynccontextmanager
async def run_workers(server: MemoryServer, plant: Plant, configuration: Configuration) -> AsyncIterator[None]:
    """Environment and inference workers for the length of the block."""
    drain, model = anyio.Event(), find_model_folder(configuration.run)

    async def infer(replica: int) -> None:
        name = f"inference-{replica}"
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(server.connect(RUN, worker=name))
            sampler = plant.make_sampler(model)
            await stack.enter_async_context(sampler.run())
            fetcher = WeightsFetcher(Path(configuration.run.folder) / name, get_object_store(bus, RUN))
            template = plant.make_template(model, replica)
            await run_inference(
                bus, configuration=configuration, name=name, drain=drain, sampler=sampler, template=template,
                fetch=fetcher.fetch_local,
            )  # fmt: skip
            fetcher.close()

    async def play() -> None:
        async with server.connect(RUN, worker="environment-0") as bus, open_environments(configuration) as factory:

            def make() -> Environment:
                return PlantedEnvironment(plant, factory())

            await run_environment(bus, configuration=configuration, name="environment-0", drain=drain, make=make)

    async with anyio.create_task_group() as group:
        for replica in range(plant.replicas):
            group.start_soon(infer, replica)
        group.start_soon(play)
        yield
        drain.set()


AHEAD = 3
"""Steps that are trained beyond those that are read: a run is diagnosed while it goes on, and the last steps of one that ends
have what was left over."""


async def train(plant: Plant, file: Path, steps: int) -> None:
    """One run, recorded in ``file`` up to its step ``steps``."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, anyio.fail_after(LIMIT_SECONDS):
        configuration, server = configure(plant, folder, steps + AHEAD), MemoryServer()
        for name in ("weights", "checkpoints"):
            (Path(folder) / RUN / name).mkdir(parents=True)
        settings = build_trainer_settings(configuration)
        trainer = PlantedTrainer(plant, find_model_folder(configuration.run), settings=settings)
        async with server.connect(RUN, worker="driver") as bus:
            await bus.declare(plan_run(RUN, lanes=4, max_bytes=1 << 30))
            async with run_workers(server, plant, configuration), server.connect(RUN, worker="learner-0") as own:
                await run_learner(
                    own, configuration=configuration, name="learner-0", drain=anyio.Event(), trainer=trainer,
                    curriculum=Curriculum(plant.make_tasks(), [], seed=plant.seed),
                )  # fmt: skip
            entries = []
            async for entry in bus.scan([Subjects(RUN).log]):
                entries.append(entry)
                if isinstance(step := read_stored(entry), StepTrained) and step.step == steps:
                    break
        records = Path(folder) / RUN / "tokens"
        if records.is_dir():
            shutil.copytree(records, file.with_suffix(".tokens"), dirs_exist_ok=True)
        with create_recording(file, RecordingHeader(run=RUN)) as writer:
            writer.add(entries)
            writer.finish()


def read(file: Path, plant: Plant | None) -> dict[str, Any]:
    """The findings of a recorded run, and if they are right."""
    from fleetbus_workers.cli.look.diagnose import diagnose_source

    began = time.monotonic()
    found = anyio.run(partial(diagnose_source, str(file)))
    shown = [f"{each.kind} at {each.step}" for each in found.findings]
    facts: dict[str, Any] = {"run": file.stem, "findings": shown, "seconds_diagnosis": round(time.monotonic() - began, 2)}
    if plant is None or not plant.kind:
        return facts | {"right": not found.findings}
    named = [each for each in found.findings if each.kind == plant.kind]
    return (
        facts
        | {"planted": f"{plant.kind} at {plant.step}"}
        | {"right": any(abs(each.step - plant.step) <= TOLERANCE for each in named)}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--healthy", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--plants", nargs="*", choices=list(PLANTS), default=[])
    parser.add_argument("--steps", type=int, help="instead of those of the plant")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--record-only", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.healthy)
    runs = [(f"healthy-{seed}", Plant(seed)) for seed in seeds]
    runs += [(f"{name}-{arguments.first_seed}", PLANTS[name](arguments.first_seed)) for name in arguments.plants]
    right = True
    for name, plant in runs:
        file, began = arguments.folder / f"{name}.fbrec", time.monotonic()
        if not arguments.read:
            anyio.run(train, plant, file, arguments.steps or plant.steps)
        trained = {"seconds_training": round(time.monotonic() - began)}
        if arguments.record_only:
            print(json.dumps({"run": name} | trained), flush=True)
            continue
        facts = read(file, plant) | ({} if arguments.read else trained)
        right = right and facts["right"]
        print(json.dumps(facts), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
