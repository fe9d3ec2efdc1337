"""Checkpoints of a torch trainer that cannot be read, or not now: what is wrong is told, and nothing in them is run."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fleetbus.errors import UserError
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.checkpoints import store


class Planted:
    """What a pickle of it does when it is read."""

    def __reduce__(self):
        return (exit, (3,))


def test_a_checkpoint_cannot_bring_code(folder, tmp_path):
    trainer = TorchTrainer(folder)
    index = store(trainer, tmp_path / "state") / ".metadata"
    good = index.read_bytes()
    index.write_bytes(pickle.dumps(Planted()))
    with pytest.raises(UserError, match="none of its classes"):
        trainer.restore(tmp_path / "state")
    metadata = pickle.loads(good)
    metadata.state_dict_metadata["updates"] = BytesStorageMetadata()  # would be unpickled from a file of shards
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="no tensor"):
        trainer.restore(tmp_path / "state")
    for bad in (good[: len(good) // 2], b"\x80\xff.", b"Ixx\n.", b"\x8e" + (2**62).to_bytes(8, "little"), b"V\\u12\n."):
        index.write_bytes(bad)
        with pytest.raises(UserError, match="cannot be read"):
            trainer.restore(tmp_path / "state")


def test_a_checkpoint_names_no_file_beyond_its_folder(folder, tmp_path):
    trainer = TorchTrainer(folder)
    index = store(trainer, tmp_path / "state") / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for part in metadata.storage_data.values():
        part.relative_path = f"../state/{part.relative_path}"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="no file beside it"):
        trainer.restore(tmp_path / "state")


@pytest.mark.parametrize("content", [b"", b"x" * 100, pickle.dumps(eval)], ids=["empty", "junk", "code"])
def test_shards_that_cannot_be_read_are_named(folder, tmp_path, content):
    trainer = TorchTrainer(folder)
    for shards in store(trainer, tmp_path / "state").glob("*.distcp"):
        shards.write_bytes(content)
    with pytest.raises(UserError, match=r"state.*cannot be read"):
        trainer.restore(tmp_path / "state")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_checkpoint_that_found_no_memory_counts_as_readable(error, folder, tmp_path, monkeypatch):
    trainer = TorchTrainer(folder)
    store(trainer, tmp_path / "state")

    def fail(*_):
        raise error("out of memory")

    monkeypatch.setattr(FileSystemReader, "read_data", fail)
    with pytest.raises(CheckpointException, match="out of memory"):
        trainer.restore(tmp_path / "state")
