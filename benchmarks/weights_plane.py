"""From finished training step to the first token of the new weights: by folder and by object store, beside a plain file copy.

    python benchmarks/weights_plane.py --json

The learner's own `Publication` writes a version, puts it into the store and announces it over a real server; an engine on the
same machine hears of it, fetches, validates, swaps and samples one token. Two models: the starter policy (0.5 M parameters) and
a Llama of 200 M with random weights. Every stage is timed; ``copy_seconds`` is `shutil.copyfile` and fsync of the same bytes
on the same disk, in the same run. ``seconds`` is the median over repeats, from the call of ``publish`` to the token.
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
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished, SamplingSettings, Subjects, TensorEntry
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import write_weights
from fleetbus_workers.weights.store import get_object_store, open_store

RUN = "weightsplane"
REPEATS = {"0.5M": 5, "200M": 2}
WARM_UP = {"0.5M": 1, "200M": 0}
STORES = ("folder", "nats")


class FixedTrainer(ScriptedTrainer):
    """Writes the tensors of a model, one of them changed with every version."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.tensors = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        next(iter(self.tensors.values())).mul_(1.0001)
        return write_weights(file, self.tensors)


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
    """The starter policy, or a random Llama of about 200 M parameters, float32."""
    if name == "0.5M":
        from fleetbus_workers.starter.build import find_starter_folder

        return find_starter_folder()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=13,
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
    policy = f"{store}{name.replace('.', '')}"
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
            store=open_store(bus, store, run=RUN),
        )
        train = FencedAppender(bus, subjects.train(policy), 0)
        started = LineageStarted(lineage="l1", worker="learner")
        await train.append(started)
        await publication.fence(started)
        publication.version = sampler.version
        fetcher = WeightsFetcher(folder / "copies", get_object_store(bus, RUN))
        async with bus.read([subjects.policy(policy)], start=(await bus.log_state()).last_sequence + 1) as reader:
            for repeat in range(REPEATS[name] + WARM_UP[name]):
                begun = time.perf_counter()
                with stages.timed("write_put_announce"):
                    version = await publication.publish(repeat)
                ((_, published),) = decode_entries(PolicyPublished, [await reader.receive()])
                with stages.timed("fetch"):
                    local = await fetcher.fetch_local(published)
                with stages.timed("validate_swap"):
                    await sampler.load(local)
                with stages.timed("first_token"):
                    generation = await sampler.generate(token_request(repeat))
                assert [span.version for span in generation.versions] == [version]
                totals.append(time.perf_counter() - begun)
                copies.append(await anyio.to_thread.run_sync(copied, file_of(local), folder / "copy"))
        size = file_of(local).stat().st_size
        fetcher.close()
    for values in (totals, copies, *stages.seconds.values()):
        del values[: WARM_UP[name]]
    seconds, copy = statistics.median(totals), statistics.median(copies)
    return {
        "parameters": name,
        "store": store,
        "megabytes": round(size / 1e6, 1),
        "seconds": round(seconds, 4),
        "copy_seconds": round(copy, 4),
        "ratio_to_copy": round(seconds / copy, 2),
    } | stages.medians()


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


async def main(names: list[str], stores: list[str], as_json: bool) -> None:
    from fleetbus_workers.inference.torch.sampler import TorchSampler

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            model = find_model_folder(name, Path(scratch))
            trainer = FixedTrainer(model)
            sampler = TorchSampler(model, slots=2, max_model_len=64)
            async with temporary_server() as url, connect(url, run=RUN) as bus, sampler.run():
                await bus.declare(plan_run(RUN, lanes=1))
                for store in stores:
                    row = await measure(bus, name, store, model, trainer, sampler)
                    line = msgspec.json.encode(row).decode()
                    print(line if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--parameters", default=",".join(REPEATS), help="which models: 0.5M, 200M or both")
    parser.add_argument("--stores", default=",".join(STORES), help="which stores: folder, nats or both")
    options = parser.parse_args()
    uvloop.run(main(options.parameters.split(","), options.stores.split(","), options.json))
