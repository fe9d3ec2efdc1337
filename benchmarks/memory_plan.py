"""Memory of each process of a learner at load, step, publish and checkpoint, beside what `fleetbus plan` computes for it.

    python benchmarks/memory_plan.py

Random models of three sizes, 2 and 4 processes over gloo on the CPU. Measured is anonymous memory of the process above what it
held after the imports and a step of a tiny model, sampled every millisecond; every tensor is mapped alone, so that what is
freed leaves the process. ``holds`` is what a part cannot be done without: at load the shards, and what a first pass gathers of
embedding, head and a layer, which FSDP receives in a buffer of its own; in a step (the second: the optimizer's numbers exist
after the first) what `fleetbus plan` says; at publish the shards with the optimizer's and the largest tensor; at checkpoint
the shards with the optimizer's and the copy of both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from fleetbus.config.settings import Configuration, EpisodeSettings, LearnerSettings
from fleetbus_workers.up.memory import MASTER_BYTES, plan_learner, read_shape

SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "vocab_size": 8192},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 16384},
    "medium": {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2304, "vocab_size": 32768},
}
TOKENS = 256
SEQUENCES = 16
MICRO_BATCH = 2
PARTS = ("load", "step", "publish", "checkpoint")
ALONE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
CONFIGURATION = Configuration(
    learner=LearnerSettings(micro_batch_size=MICRO_BATCH), episode=EpisodeSettings(max_episode_tokens=TOKENS)
)


def make_model(folder: Path, sizes: dict[str, int]) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    config = Qwen3Config(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def read_anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextmanager
def watch_peak(found: dict[str, int], name: str, base: int) -> Iterator[None]:
    """The most that the process held during the block."""
    over, peak = threading.Event(), [read_anonymous()]

    def watch() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], read_anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    found[name] = max(peak[0], read_anonymous()) - base


def draw_batch(vocabulary: int, tokens: int, *, sequences: int = SEQUENCES, prompt: int = 8) -> list[Any]:
    """Sequences of random ids, sampled from ``prompt`` on."""
    from fleetbus_workers.learner.base import TrainingSequence

    draw = np.random.default_rng(0)
    mask = np.arange(tokens) >= prompt
    return [
        TrainingSequence(
            episode_id=f"e{index}",
            group_id="g",
            ids=draw.integers(3, vocabulary, tokens).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -4.0, 0).astype(np.float32),
            advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        for index in range(sequences)
    ]


def work(warm: Path, folder: Path, out: Path) -> None:
    """One process: warm up on a tiny model, then measure."""
    import torch

    from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    torch.set_num_threads(1)
    settings = TorchTrainerSettings(learner=CONFIGURATION.learner)
    first = TorchTrainer(warm, settings=settings)
    first.train(draw_batch(64, 32), version=0, progress=0.0)
    first.save_weights(out / "warm")
    rank = first.shards.rank
    del first
    gc.collect()
    base, found = read_anonymous(), dict[str, int]()
    with watch_peak(found, "load", base):
        trainer = TorchTrainer(folder, settings=settings)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    trainer.train(draw_batch(vocabulary, TOKENS), version=0, progress=0.0)
    steps: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.train(draw_batch(vocabulary, TOKENS), version=0, progress=0.0),
        "publish": lambda: trainer.save_weights(out / "weights"),
        "checkpoint": lambda: trainer.start_checkpoint(out / "checkpoint")(),
    }
    if rank == 0:
        (out / "checkpoint").mkdir(exist_ok=True)
    for name, act in steps.items():
        gc.collect()
        with watch_peak(found, name, base):
            act()
    (out / f"{rank}.json").write_text(json.dumps(found))
    trainer.shards.broadcast(None)
    os._exit(0)  # two trainers shared the process group, and it is closed once


def measure(warm: Path, folder: Path, out: Path, processes: int) -> list[dict[str, int]]:
    """What each process held."""
    out.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, __file__, "--work", str(warm), str(folder), str(out)]
    subprocess.run(command, env=os.environ | ALONE, check=True, stderr=subprocess.DEVNULL)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


def compare(folder: Path, processes: int, found: list[dict[str, int]]) -> dict[str, Any]:
    """Measured peaks (the largest of all processes) beside what is computed, in MB."""
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    plan = plan_learner(shape, CONFIGURATION, processes, on_gpu=False)
    shard = shape.parameters * MASTER_BYTES / processes
    peaks = {name: max(each[name] for each in found) for name in PARTS}
    holds = {
        "load": shard + MASTER_BYTES * 2 * (shape.embedding + shape.layer),
        "step": float(plan.total),
        "publish": 3 * shard + shape.largest * MASTER_BYTES,
        "checkpoint": 6 * shard,
    }
    ratios = {name: round(peaks[name] / holds[name], 3) for name in PARTS}
    return {
        "parameters": shape.parameters,
        "processes": processes,
        "measured_mb": {name: round(value / 1e6) for name, value in peaks.items()},
        "holds_mb": {name: round(value / 1e6) for name, value in holds.items()},
        "ratio": ratios,
        "plan_parts_mb": {name: round(value / 1e6) for name, value in plan.parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--work", nargs=3, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    if not given.json:
        print("| size | parameters | processes | " + " | ".join(f"{name}: measured / holds" for name in PARTS) + " |")
        print("|---" * (3 + len(PARTS)) + "|")
    with tempfile.TemporaryDirectory() as place:
        warm = make_model(Path(place) / "warm", {**SIZES["tiny"], "num_hidden_layers": 2, "vocab_size": 64})
        for size in given.sizes:
            folder = make_model(Path(place) / size, SIZES[size])
            for processes in given.processes:
                began = time.monotonic()
                result = compare(folder, processes, measure(warm, folder, Path(place) / f"{size}-{processes}", processes))
                result |= {"size": size, "seconds": round(time.monotonic() - began)}
                print(json.dumps(result) if given.json else format_row(result), flush=True)


def format_row(result: dict[str, Any]) -> str:
    cells = [f"{result['measured_mb'][name]} / {result['holds_mb'][name]} MB: {result['ratio'][name]:.2f}" for name in PARTS]
    return f"| {result['size']} | {result['parameters'] / 1e6:.1f} M | {result['processes']} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
