"""A checkpoint that another learner removes while this one restores it: the learner says so, and is started again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.checkpoints import Checkpoint, write_checkpoint
from fleetbus_workers.learner.lineage_start import CheckpointRemoved, LineageStart
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import make_model


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> TorchTrainer:
    return TorchTrainer(make_model(tmp_path_factory.mktemp("model")))


def begin_at(path: Path, trainer: TorchTrainer) -> LineageStart:
    point: Any = SimpleNamespace(checkpoint_path=path)
    nothing: Any = None
    names = ("appender", "publication", "checkpoints", "pool", "requests", "admission", "judge", "league")
    parts = dict.fromkeys(names, nothing)
    return LineageStart(nothing, nothing, point, trainer, Runtime(), **parts)


def write(folder: Path, trainer: Trainer) -> Path:
    return write_checkpoint(
        folder, Checkpoint(lineage="l1", step=1, version=1, floor=1, settled=(), next_group=0), trainer
    ).path


@pytest.mark.parametrize("gone", [".metadata", "*.distcp", "*"])
async def test_a_learner_whose_checkpoint_is_removed_says_so_whichever_file_went_first(
    gone: str, tmp_path: Path, trainer: TorchTrainer
) -> None:
    path = write(tmp_path, trainer)
    for file in path.glob(gone):
        file.unlink()
    with pytest.raises(CheckpointRemoved, match="was removed while it was read"):
        await begin_at(path, trainer).run(Configuration(), worker="w")
    shutil.rmtree(path)
    with pytest.raises(CheckpointRemoved, match="was removed while it was read"):
        await begin_at(path, trainer).run(Configuration(), worker="w")


async def test_a_checkpoint_of_another_trainer_is_refused_as_before(tmp_path: Path, trainer: TorchTrainer) -> None:
    with pytest.raises(UserError, match="holds no state of this trainer"):
        await begin_at(write(tmp_path, ScriptedTrainer()), trainer).run(Configuration(), worker="w")
