"""The default task's updates in one process without any bus: what a run costs that records, isolates and distributes nothing.

    python benchmarks/one_process.py --json                      # as many updates as a batch mean of .9 needs
    python benchmarks/one_process.py --json --run .fleetbus/runs/default

Each update plays 16 groups of 8 episodes side by side (`fleetbus_workers.starter.local_rollout`: transformers' model, tools
called as functions), and trains them with fleetbus's own trainer and settings. ``updates`` is the first after which the mean
success of five batches exceeds .9. With ``--run``, of a finished `fleetbus up`: as many updates as that run needed for it, and
``ratio``, its time from the first request for training to that update, to the time of as many here. Neither contains
evaluations.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleetbus import open_run
from fleetbus.config.settings import LearnerSettings
from fleetbus.core.algorithms.advantages import grpo
from fleetbus_workers.environment.adapters.warehouse.items import draw_warehouse
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.starter.build import find_starter_folder
from fleetbus_workers.starter.local_rollout import Rollout, run_rollouts
from fleetbus_workers.weights.file import read_weights

MEAN_OF = 5
WANTED = 0.9
SETTINGS = LearnerSettings()


def find_update(success: Sequence[float]) -> int:
    """After how many updates the mean of five batches first exceeded .9; all of them if it never did."""
    means = (sum(success[stop - MEAN_OF : stop]) / MEAN_OF for stop in range(MEAN_OF, len(success) + 1))
    return next((stop for stop, mean in enumerate(means, MEAN_OF) if mean > WANTED), len(success))


def build_batch(played: Sequence[Rollout]) -> list[TrainingSequence]:
    groups = np.repeat(np.arange(SETTINGS.groups), SETTINGS.group_size)
    advantages = grpo(np.array([episode.reward for episode in played]), groups)
    return [
        TrainingSequence(
            episode_id=f"e{index}",
            group_id=f"g{groups[index]}",
            ids=np.array(episode.ids, np.int32),
            loss_mask=np.array(episode.loss_mask),
            logprobs=np.array(episode.logprobs, np.float32),
            advantages=np.where(episode.loss_mask, advantages[index], 0.0).astype(np.float32),
            versions=np.where(episode.loss_mask, 0, -1).astype(np.int32),
        )
        for index, episode in enumerate(played)
    ]


def train(updates: int, *, seed: int, threads: int) -> dict[str, Any]:
    """Train so many updates, 0: until the mean of five batches exceeds .9."""
    settings = TorchTrainerSettings(learner=msgspec.structs.replace(SETTINGS, threads=threads))
    trainer = TorchTrainer(find_starter_folder(), settings=settings)
    tokenizer = AutoTokenizer.from_pretrained(find_starter_folder())
    model = AutoModelForCausalLM.from_pretrained(find_starter_folder()).eval()
    success: list[float] = []
    seconds = {"sample": 0.0, "train": 0.0}
    started, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights.safetensors"
        for step in range(updates or SETTINGS.steps):
            began = time.perf_counter()
            tasks = [draw_warehouse(seed * 1_000_003 + step * SETTINGS.groups + group) for group in range(SETTINGS.groups)]
            played = run_rollouts(model, tokenizer, [task for task in tasks for _ in range(SETTINGS.group_size)], seed=step)
            sampled = time.perf_counter()
            trainer.train(build_batch(played), version=0, progress=step / SETTINGS.steps)
            model.load_state_dict(read_weights(weights, trainer.save_weights(weights)), strict=False)
            seconds["sample"] += sampled - began
            seconds["train"] += time.perf_counter() - sampled
            success.append(sum(episode.reward for episode in played) / len(played))
            if not updates and len(success) >= MEAN_OF and np.mean(success[-MEAN_OF:]) > WANTED:
                break
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "updates": len(success),
        "threads": threads,
        "seconds": round(wall, 2),
        "cpu_seconds_per_update": round(cpu / len(success), 3),
        "seconds_sampling": round(seconds["sample"], 2),
        "seconds_training": round(seconds["train"], 2),
        "success": round(float(np.mean(success[-MEAN_OF:])), 3),
    }


def measure_run(folder: str) -> tuple[int, float]:
    """Updates that a run needed, and seconds from its first request for training to the last of them."""
    run = open_run(folder)
    steps = list(run.metrics())
    updates = find_update([step.metrics["success"] for step in steps])
    began = min(row.requested_ns for row in run.episodes() if row.split == "train" and row.requested_ns)
    return updates, (steps[updates - 1].time_ns - began) / 1e9


def main(run: str, updates: int, seed: int, threads: int, as_json: bool) -> None:
    needed, seconds = measure_run(run) if run else (updates, 0.0)
    found = train(needed, seed=seed, threads=threads)
    if run:
        found |= {"run_seconds": round(seconds, 2), "ratio": round(seconds / found["seconds"], 2)}
    print(msgspec.json.encode(found).decode() if as_json else "  ".join(f"{name} {value}" for name, value in found.items()))


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="", help="folder of a finished run")
    parser.add_argument("--updates", type=int, default=0, help="how many; 0: until a batch mean of .9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    main(given.run, given.updates, given.seed, given.threads, given.json)
