"""Held-out tasks played by a model that no run has trained: a baseline, or what a run left behind.

Workers of each kind run in this process, over a log in memory; nothing of it stays. Above it is `fleetbus evaluate --model`.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.memory import MemoryServer
from fleetbus.config.engines import list_engines
from fleetbus.config.seats import freeze_trained
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished, Subjects, encode
from fleetbus_workers.api.evaluation import Evaluation, select_tasks, start_missing_roles, summarise_evaluation
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.environment.adapters.foreign.benchmarks import Benchmark


async def evaluate_model(
    configuration: Configuration,
    *,
    samples: int = 1,
    ks: Sequence[int] | None = None,
    temperature: float | None = None,
    on_progress: Callable[[int, int], None] = lambda done, count: None,
    episodes: int | None = None,
    benchmark: Benchmark | None = None,
) -> Evaluation:
    """Play ``samples`` episodes of each held-out task of a configuration with the model that it names, or of ``episodes`` tasks
    of a ``benchmark`` that it fits; see `evaluate_run`. Its paths are absolute, and its tasks fit its model (see
    `fleetbus_workers.up.command.check_run`). Raises `UserError`."""
    from fleetbus_workers.learner.held_out import play
    from fleetbus_workers.up.process_plans import build_stream_plan

    engines = list_engines(lambda kind: kind.is_local)
    if configuration.inference.engine not in engines:
        raise UserError(f"--model is played by the engines {' and '.join(engines)}, not {configuration.inference.engine}")
    tasks = select_tasks(configuration, episodes, benchmark)
    temperature = configuration.episode.temperature if temperature is None else temperature
    run = configuration.run
    run = msgspec.structs.replace(run, seats=freeze_trained(run.seats, str(find_model_folder(run))))
    with tempfile.TemporaryDirectory(prefix="fleetbus-evaluate-") as scratch:
        inference = msgspec.structs.replace(configuration.inference, scratch=scratch)
        configuration = msgspec.structs.replace(configuration, inference=inference, run=run)
        published = await anyio.to_thread.run_sync(_write_version, find_model_folder(run), Path(scratch), run.policy)
        async with MemoryServer().connect(run.name, worker="evaluate") as bus:
            await bus.declare(build_stream_plan(configuration))
            await bus.publish(Subjects(run.name).policy(run.policy), encode(published))
            async with anyio.create_task_group() as group:
                drain = anyio.Event()
                start_missing_roles(group, bus, configuration, set(), drain)
                started = anyio.current_time()
                results = await play(
                    bus,
                    configuration,
                    tasks,
                    name=f"eval-{secrets.token_hex(4)}",
                    samples=samples,
                    temperature=temperature,
                    published=published,
                    pinned=True,
                    on_progress=on_progress,
                )
                seconds = anyio.current_time() - started
                drain.set()
    return summarise_evaluation(
        configuration,
        published,
        results,
        asked=len(tasks) * samples,
        samples=samples,
        ks=ks,
        temperature=temperature,
        seconds=seconds,
        benchmark=benchmark.facts if benchmark is not None else None,
    )


def _write_version(folder: Path, scratch: Path, policy: str) -> PolicyPublished:
    """The weights of a model folder as the first version of a policy, as a learner publishes it."""
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    file = scratch / "model-v000000.safetensors"
    trainer = TorchTrainer(folder)
    try:
        manifest = trainer.save_weights(file)
    finally:
        trainer.close()
    return PolicyPublished(
        policy=policy, version=0, lineage="model", step=0, uri=file.as_uri(), manifest=manifest, size_bytes=file.stat().st_size
    )
