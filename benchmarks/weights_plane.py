"""From finished training step to the first token of the new weights: by folder, object store, collective; and a plain copy.

    python benchmarks/weights_plane.py --json
    python benchmarks/weights_plane.py --json --parameters 135M,500M --stores folder,collective
    python benchmarks/weights_plane.py --json --parameters 135M --stores folder,collective --engine vllm

The learner's own `Publication` writes a version, puts it into the store and announces it over a real server; an engine on the
same machine hears of it, fetches, validates, swaps and samples one token. Models: the starter policy (0.5 M parameters) and
Llamas of 135, 200 and 500 M with random weights. With ``collective`` the file is written and announced as with ``folder``, and
the engine gets its bytes meanwhile, over gloo and loopback; engine torch is in this process, vLLM's worker in its own.
``by_transfer`` counts the versions that came so. Every stage is timed; ``copy_seconds`` is `shutil.copyfile` and fsync of the
same bytes on the same disk, in the same run. ``seconds`` is the median over repeats, from the call of ``publish`` to the token.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.concurrency.task_groups import open_flat_task_group
from fleetbus.config.settings import Configuration, RunSettings, WeightsSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Heartbeat, LineageStarted, PolicyPublished, SamplingSettings, Subjects, TensorEntry, encode
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WritingWatcher, write_weights
from fleetbus_workers.weights.store import get_object_store, open_store
from fleetbus_workers.weights.transfer import ENGINE_COUNTER
from fleetbus_workers.weights.transfer_choice import open_receiver, open_sender

RUN = "weightsplane"
REPEATS = {"0.5M": 5, "135M": 3, "200M": 2, "500M": 2}
WARM_UP = {"0.5M": 1, "135M": 1, "200M": 0, "500M": 0}
DEFAULTS = ("0.5M", "200M")
LAYERS = {"135M": 8, "200M": 13, "500M": 36}
STORES = ("folder", "nats", "collective")


BEAT_SECONDS = 0.5


class FixedTrainer(ScriptedTrainer):
    """Writes the tensors of a model, one of them changed with every version."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.watcher: WritingWatcher | None = None
        from transformers import AutoModelForCausalLM

        self.tensors = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        next(iter(self.tensors.values())).mul_(1.0001)
        return write_weights(file, self.tensors, self.watcher)


class Stages:
    """Seconds by stage, over all repeats."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 4) for name, values in self.seconds.items()}


def find_model_folder(name: str, folder: Path) -> Path:
    """The starter policy, or a random Llama of about as many parameters, float32."""
    if name == "0.5M":
        from fleetbus_workers.starter.build import find_starter_folder

        return find_starter_folder()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS[name],
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def copied(source: Path, target: Path) -> float:
    """Seconds of a plain copy that is on the disk at the end."""
    started = time.perf_counter()
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


async def measure(bus: Bus, name: str, store: str, model: Path, trainer: FixedTrainer, sampler: Any) -> dict[str, Any]:
    subjects, stages, totals, copies = Subjects(RUN), Stages(), [], []
    by_transfer = 0
    policy = f"{store}{name.replace('.', '')}"
    configuration = Configuration(
        run=RunSettings(name=RUN, policy=policy), weights=WeightsSettings(transfer="collective", transfer_seconds=300.0)
    )
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as scratch:
        folder = Path(scratch)
        publication = Publication(
            bus,
            subjects,
            trainer,
            policy=policy,
            lineage="l1",
            folder=folder,
            keep=2,
            runtime=Runtime(),
            store=open_store(bus, "folder" if store == "collective" else store, run=RUN),
            sender=open_sender(bus, subjects, configuration, Runtime()) if store == "collective" else None,
        )
        receiver = open_receiver(bus, configuration, sampler, None) if store == "collective" else None
        train = FencedAppender(bus, subjects.train(policy), 0)
        started = LineageStarted(lineage="l1", worker="learner")
        await train.append(started)
        await publication.fence(started)
        publication.version = sampler.version
        fetcher = WeightsFetcher(folder / "copies", get_object_store(bus, RUN))
        async with (
            bus.read([subjects.policy(policy)], start=(await bus.log_state()).last_sequence + 1) as reader,
            publication.run(),
            open_flat_task_group() as tasks,
        ):
            if receiver is not None:
                tasks.start_soon(receiver.run)
                tasks.start_soon(beat, bus, subjects)
                await anyio.sleep(2 * BEAT_SECONDS)
            for repeat in range(REPEATS[name] + WARM_UP[name]):
                begun = time.perf_counter()
                with stages.timed("write_put_announce"):
                    version = await publication.publish(repeat)
                ((_, published),) = decode_entries(PolicyPublished, [await reader.receive()])
                with stages.timed("fetch"):
                    local = await fetcher.fetch_local(published)
                with stages.timed("validate_swap"):
                    taken = receiver is not None and await receiver.load(published, fetcher.fetch_local)
                    if not taken:
                        await sampler.load(local)
                by_transfer += taken
                with stages.timed("first_token"):
                    generation = await sampler.generate(token_request(repeat))
                assert [span.version for span in generation.versions] == [version]
                totals.append(time.perf_counter() - begun)
                copies.append(await anyio.to_thread.run_sync(copied, file_of(local), folder / "copy"))
            tasks.cancel_scope.cancel()
        size = file_of(local).stat().st_size
        fetcher.close()
    for values in (totals, copies, *stages.seconds.values()):
        del values[: WARM_UP[name]]
    seconds, copy = statistics.median(totals), statistics.median(copies)
    return {
        "parameters": name,
        "store": store,
        "by_transfer": f"{by_transfer} of {len(totals) + WARM_UP[name]}",
        "megabytes": round(size / 1e6, 1),
        "seconds": round(seconds, 4),
        "copy_seconds": round(copy, 4),
        "ratio_to_copy": round(seconds / copy, 2),
    } | stages.medians()


async def beat(bus: Bus, subjects: Subjects) -> None:
    """Say that there is an engine, as inference workers do."""
    while True:
        said = Heartbeat(role="inference", worker="bench", counters={ENGINE_COUNTER: 0.0})
        await bus.broadcast(subjects.heartbeat("inference", "bench"), encode(said))
        await anyio.sleep(BEAT_SECONDS)


def file_of(published: PolicyPublished) -> Path:
    return Path(published.uri.removeprefix("file://"))


def token_request(seed: int) -> GenerationRequest:
    return GenerationRequest(
        cache_key=f"e{seed}",
        ids=[5, 6, 7],
        sampling=SamplingSettings(max_tokens=1),
        stop_ids=frozenset(),
        max_tokens=1,
        seed=seed,
    )


def open_sampler(engine: str, model: Path, place: Path) -> Any:
    if engine == "torch":
        from fleetbus_workers.inference.torch.sampler import TorchSampler

        return TorchSampler(model, slots=2, max_model_len=64)
    from fleetbus_workers.inference.vllm import VllmSampler
    from fleetbus_workers.inference.vllm.engine import EngineSettings
    from fleetbus_workers.starter.build import find_starter_folder

    for file in find_starter_folder().glob("tokenizer*.json"):
        shutil.copyfile(file, model / file.name)
    return VllmSampler(EngineSettings(folder=model, slots=2, max_model_len=256, kv_cache_mib=256), place=place)


async def main(names: list[str], stores: list[str], engine: str, as_json: bool) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            model = find_model_folder(name, Path(scratch) / "model")
            trainer = FixedTrainer(model)
            sampler = open_sampler(engine, model, Path(scratch) / "served")
            async with temporary_server() as url, connect(url, run=RUN) as bus, sampler.run():
                await bus.declare(plan_run(RUN, lanes=1))
                for store in stores:
                    row = await measure(bus, name, store, model, trainer, sampler)
                    line = msgspec.json.encode(row).decode()
                    print(line if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--parameters", default=",".join(DEFAULTS), help=f"which models of {', '.join(REPEATS)}")
    parser.add_argument("--stores", default=",".join(STORES), help=f"which of {', '.join(STORES)}")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="which engine samples")
    options = parser.parse_args()
    uvloop.run(main(options.parameters.split(","), options.stores.split(","), options.engine, options.json))
