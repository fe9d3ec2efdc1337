"""Checkpoints on the disk: the newest are kept whatever the clock says, and a torn one never passes for whole."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from fleetbus_schemas import TensorEntry
from fleetbus_workers.learner.checkpoints import (
    INDEX,
    STATE,
    Checkpoint,
    CheckpointDamaged,
    hash_index,
    is_whole,
    open_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from fleetbus_workers.learner.scripted import ScriptedTrainer


def written(folder: Path, lineage: str, step: int, trainer: ScriptedTrainer | None = None) -> Path:
    checkpoint = Checkpoint(lineage=lineage, step=step, version=step, floor=1, settled=(), next_group=0)
    return write_checkpoint(folder, checkpoint, trainer or ScriptedTrainer()).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_is_kept_though_the_clock_was_set_back(tmp_path: Path) -> None:
    for step in (1, 2):
        os.utime(written(tmp_path, "l1", step), (time.time() + 3600,) * 2)
    written(tmp_path, "l1", 3)
    prune_checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["l1-000002", "l1-000003"]


def test_a_later_lineage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    for lineage, step in (("l2", 30), ("l10", 4), ("l9", 1_000_000)):
        written(tmp_path, lineage, step)
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["l10-000004"]


def test_what_a_kill_left_half_written_is_removed_and_takes_no_place(tmp_path: Path) -> None:
    written(tmp_path, "l1", 1)
    (tmp_path / ".l1-000002.part").mkdir()
    (tmp_path / "notes").mkdir()
    written(tmp_path, "l2", 2)
    prune_checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["l1-000001", "l2-000002", "notes"]


class FullDisk(ScriptedTrainer):
    """The disk is full when the optimizer's state is written."""

    def save_state(self, file: Path) -> None:
        file.write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        return super().save_weights(file)


def test_a_checkpoint_that_does_not_fit_leaves_the_ones_before_and_none_of_its_name(tmp_path: Path) -> None:
    before = written(tmp_path, "l1", 1)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, "l1", 2, FullDisk())
    assert read_checkpoint(before) is not None
    assert not (tmp_path / "l1-000002").exists()


def test_a_checkpoint_with_a_changed_byte_is_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, "l1", 1)
    assert read_checkpoint(path) is not None
    (path / STATE).write_text("{ }")
    assert read_checkpoint(path) is None


def test_what_cannot_be_read_and_what_is_damaged_are_two_things(tmp_path: Path) -> None:
    path = written(tmp_path, "l1", 1)
    (path / STATE).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        open_checkpoint(path)
    (path / STATE).write_text("{ }")
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(path)


def test_a_checkpoint_of_a_cut_lineage_stays_until_one_that_counts_has_come_as_far(tmp_path: Path) -> None:
    for lineage, step in (("l1", 8), ("l1", 9), ("l2", 1)):
        written(tmp_path, lineage, step)
    prune_checkpoints(tmp_path, 1, lambda lineage, step: lineage == "l1")
    assert names(tmp_path) == ["l1-000008", "l1-000009", "l2-000001"]
    written(tmp_path, "l2", 8)
    prune_checkpoints(tmp_path, 1, lambda lineage, step: lineage == "l1")
    assert names(tmp_path) == ["l1-000009", "l2-000008"]


def test_nothing_is_removed_for_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, "l1", 1)
    (written(tmp_path, "l1", 2) / STATE).unlink()
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["l1-000001", "l1-000002"]


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "a/b", "..", ".", "", "nul\0", "pipe", "below"])
def test_an_index_that_names_what_is_no_file_beside_it_is_damaged(name: str, tmp_path: Path) -> None:
    """Reading some of them would never end."""
    path = written(tmp_path, "l1", 1)
    os.mkfifo(path / "pipe")
    (path / "below").mkdir()
    index = msgspec.json.decode((path / "checkpoint.json").read_bytes())
    index["sha256"][name] = "0" * 64
    (path / "checkpoint.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(path)


def test_a_pipe_in_the_place_of_the_index_is_not_waited_for(tmp_path: Path) -> None:
    path = written(tmp_path, "l1", 1)
    (path / "checkpoint.json").unlink()
    os.mkfifo(path / "checkpoint.json")
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        open_checkpoint(path)


def test_an_index_that_was_altered_is_damaged_whatever_it_says(tmp_path: Path) -> None:
    """Its own checksums are those of the other files: only the log has that of the index."""
    path = write_checkpoint(tmp_path, Checkpoint(lineage="l1", step=2, version=2, floor=700, settled=("a",), next_group=3),
                            ScriptedTrainer()).path  # fmt: skip
    known = hash_index(path)
    assert open_checkpoint(path, known).floor == 700
    for change in ({"floor": 100}, {"floor": 1100}, {"floor": 10**9}, {"settled": ()}, {"next_group": 0}):
        (path / INDEX).write_bytes(msgspec.json.encode(msgspec.structs.replace(open_checkpoint(path), **change)))
        with pytest.raises(CheckpointDamaged, match="not the one that the log names"):
            open_checkpoint(path, known)
        assert not is_whole(path, known)


def test_a_floor_that_no_log_has_is_damage_without_any_digest(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, Checkpoint(lineage="l1", step=2, version=2, floor=700, settled=(), next_group=3),
                            ScriptedTrainer()).path  # fmt: skip
    content = (path / INDEX).read_text()
    (path / INDEX).write_text(content.replace('"floor":700', '"floor":-600'))
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(path)


def test_a_written_checkpoint_is_known_by_its_index_though_its_disk_goes_away(tmp_path: Path) -> None:
    """Found by the simulation: a learner ended that read the index again to tell the log of it."""
    checkpoint = Checkpoint(lineage="l1", step=2, version=2, floor=700, settled=(), next_group=3)
    written = write_checkpoint(tmp_path, checkpoint, ScriptedTrainer())
    assert written.index_sha256 == hash_index(written.path)
