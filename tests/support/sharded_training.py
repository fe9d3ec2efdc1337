"""Runs one process of a sharded training: ``torchrun ... sharded_training.py FOLDER OUT``.

Rank 0 leads: it trains three batches, stores a checkpoint after the second, and writes what was measured; the others follow.
``OUT/settings.json`` are the trainer's settings. With ``OUT/resume`` it goes on from the checkpoint there instead.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch import token_scores
from fleetbus_workers.learner.torch.distributed import LeaderTrainer, run_follower
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.checkpoints import store
from tests.support.trainable_model import VOCABULARY, make_sequence

PROMPT = 12
CHECKPOINT_AFTER = 2
STEPS = 3


def batches() -> list[list[TrainingSequence]]:
    """Three batches of seven sequences, so that two processes never have the same number of them."""
    draw = np.random.default_rng(0)
    return [[_sequence(draw, index) for index in range(7)] for _ in range(STEPS)]


def _sequence(draw: np.random.Generator, index: int) -> TrainingSequence:
    ids = draw.integers(3, VOCABULARY, PROMPT + int(draw.integers(4, 20))).astype(np.int32)
    mask = np.arange(len(ids)) >= PROMPT
    advantage = draw.normal() if index != 3 else 0.0
    logprobs = -4.0 + 0.1 * draw.normal(size=len(ids))
    return make_sequence(index, ids, mask, logprobs=logprobs, advantage=advantage, version=0)


def train(trainer: TorchTrainer | LeaderTrainer, out: Path) -> None:
    """Train and write ``metrics.json``, ``tokens.json``, ``weights``, and a checkpoint, unless one is there."""
    resume = out / "resume"
    first = 0
    if resume.is_dir():
        trainer.restore(resume)
        first = CHECKPOINT_AFTER
    metrics, tokens = [], []
    for number, batch in enumerate(batches()[first:], start=first):
        metrics.append(trainer.train(batch, version=0, progress=number / STEPS))
        traced = [(each.logprobs, each.gradients, each.clipped) for each in trainer.traced_tokens]
        tokens.append([np.stack(each).astype(float).tolist() for each in traced])
        if number + 1 == CHECKPOINT_AFTER:
            store(trainer, out / "checkpoint")
    trainer.save_weights(out / "weights")
    trainer.save_model(out / "model")
    (out / "metrics.json").write_text(json.dumps(metrics))
    (out / "tokens.json").write_text(json.dumps(tokens))


def main(folder: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    token_scores.CHUNK_BYTES = 5 * 4 * VOCABULARY  # five tokens at a time, where one process computes all at once
    settings = msgspec.json.decode((out / "settings.json").read_bytes(), type=TorchTrainerSettings)
    trainer = TorchTrainer(folder, settings=settings)
    if trainer.shards.rank:
        run_follower(trainer)
        return
    leading = LeaderTrainer(trainer)
    try:
        train(leading, out)
    finally:
        leading.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
