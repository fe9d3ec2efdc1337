"""Runs one process of a sharded training in which something fails: ``torchrun ... sharded_faults.py FOLDER OUT FAULT``.

Rank 0 leads and writes ``OUT/told``: what it saw. A fault is planted in one process.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleetbus_workers.learner.torch import checkpoint_files
from fleetbus_workers.learner.torch import trainer as trainers
from fleetbus_workers.learner.torch.distributed import LeaderTrainer, run_follower
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.checkpoints import store
from tests.support.sharded_training import batches
from tests.support.trainer_settings import trainer_settings


def fail_once(owner: Any, name: str, error: Exception) -> None:
    """The next call of ``owner.name`` raises ``error``, the ones after it do what they did."""
    original = getattr(owner, name)

    def fail(*arguments: object, **named: object) -> None:
        setattr(owner, name, original)
        raise error

    setattr(owner, name, fail)


FULL = OSError(errno.ENOSPC, "no space left")


def plant(fault: str, rank: int) -> None:
    if fault == "follower cannot write its shards" and rank == 1:
        fail_once(checkpoint_files._HashingStream, "write", FULL)
    if fault == "leader cannot write the model" and rank == 0:
        fail_once(shutil, "copyfile", FULL)
    if fault == "leader fails in a step" and rank == 0:
        fail_once(trainers, "compute_loss", RuntimeError("out of memory"))
    if fault == "follower cannot read its shards" and rank == 1:
        fail_once(checkpoint_files._PlainReader, "read_data", OSError(errno.EIO, "input/output error"))
    if fault == "follower is killed" and rank == 1:
        # After the first step it stands in nothing that another process would notice.
        original = TorchTrainer.train

        def train_and_die(self: TorchTrainer, *arguments: Any, **named: Any) -> dict[str, float]:
            original(self, *arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        TorchTrainer.train = train_and_die  # type: ignore[method-assign]


def lead(leading: LeaderTrainer, out: Path, fault: str) -> list[str]:
    told = []
    first, second, _ = batches()

    def attempt(name: str, act: Any) -> None:
        try:
            act()
            told.append(f"{name}: done")
        except Exception as error:
            told.append(f"{name}: {type(error).__name__}")
            (out / "told").write_text("\n".join(told))
            if not isinstance(error, OSError):
                raise

    attempt("train", lambda: leading.train(first, version=0, progress=0.0))
    if fault == "follower is killed":
        threading.Event().wait()  # as a learner that waits for episodes does
    attempt("checkpoint", lambda: store(leading, out / "first"))
    attempt("train", lambda: leading.train(second, version=0, progress=0.5))
    attempt("checkpoint", lambda: store(leading, out / "second"))
    attempt("model", lambda: leading.save_model(out / "model"))
    attempt("model", lambda: leading.save_model(out / "model"))
    attempt("weights", lambda: leading.save_weights(out / "weights"))
    if fault == "follower cannot read its shards":
        attempt("restore", lambda: leading.restore(out / "second"))
    return told


def main(folder: Path, out: Path, fault: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = TorchTrainer(folder, settings=trainer_settings(micro_batch_size=2))
    plant(fault, trainer.shards.rank)
    if trainer.shards.rank:
        run_follower(trainer)
        return
    leading = LeaderTrainer(trainer)
    try:
        told = lead(leading, out, fault)
    finally:
        leading.close()
    (out / "told").write_text("\n".join([*told, "closed"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
