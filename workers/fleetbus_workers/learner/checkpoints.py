"""Checkpoints: one folder each, written under a temporary name, synced and renamed, so that a torn one is never mistaken.

What is in it: the trainer's files, and ``checkpoint.json`` (this module's `Checkpoint`, with the SHA-256 of each of them). A
trainer may write beside the training; the folder has its name when all of it is there. Resume follows the log:
`CheckpointStored` names the folder and the SHA-256 of its index, and with it all of the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from fleetbus.core.training.standings import Meeting
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.learner.base import FinishWriting, Trainer
from fleetbus_workers.learner.disk_full import detect_full_disk

WEIGHTS = "weights.safetensors"
STATE = "trainer.state"
"""Files of trainers that have little to write."""

INDEX = "checkpoint.json"
HASH_SUFFIX = ".sha256"
"""A trainer that hashes what it writes leaves the hexadecimal digest beside it."""

_NAME = re.compile(r"(?P<part>\.?)l(?P<lineage>\d+)-(?P<step>\d{6,})(\.part)?")

log = structlog.get_logger()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """From where a learner can resume. ``floor`` and ``settled`` are those of `fleetbus.core.training.ledger.Ledger`;
    ``next_group`` is the number of the first group that was never admitted, ``first_open_group`` that of the first that may
    still be asked for. ``meetings`` are the games of a league so far, ``baselines`` the first versions of leagues by policy: a
    log that is restored from an archive that forgets may know them no more."""

    lineage: str
    step: Annotated[int, msgspec.Meta(ge=0)]
    version: int
    floor: Annotated[int, msgspec.Meta(ge=1)]
    settled: tuple[str, ...]
    next_group: Annotated[int, msgspec.Meta(ge=0)]
    first_open_group: int = 0
    meetings: tuple[Meeting, ...] = ()
    baselines: dict[str, PolicyPublished] = msgspec.field(default_factory=dict)
    sha256: dict[str, str] = msgspec.field(default_factory=dict)

    def limit_floor(self, floor: int) -> Checkpoint:
        """The same for a log in which all below ``floor`` is settled, and nothing that the checkpoint knows stands above."""
        return self if floor >= self.floor else msgspec.structs.replace(self, floor=floor, settled=())


class StartedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that is being written in ``partial``. ``finish`` waits for the trainer; None: it has written."""

    checkpoint: Checkpoint
    partial: Path
    finish: FinishWriting | None


class WrittenCheckpoint(msgspec.Struct, frozen=True):
    """The place of a checkpoint, and the SHA-256 of its index as it was written: its disk may be away by now."""

    path: Path
    index_sha256: str


def write_checkpoint(folder: Path, checkpoint: Checkpoint, trainer: Trainer) -> WrittenCheckpoint:
    """Write a checkpoint below ``folder``; blocking, atomic, safe against a kill at any instant.

    Raises `OSError`, and leaves nothing behind then.
    """
    return finish_checkpoint(start_checkpoint(folder, checkpoint, trainer))


def start_checkpoint(folder: Path, checkpoint: Checkpoint, trainer: Trainer) -> StartedCheckpoint:
    """The first half of `write_checkpoint`, after which the trainer may continue training."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{checkpoint.lineage}-{checkpoint.step:06d}.part"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    with _remove_on_error(partial):
        return StartedCheckpoint(checkpoint=checkpoint, partial=partial, finish=trainer.start_checkpoint(partial))


def finish_checkpoint(started: StartedCheckpoint) -> WrittenCheckpoint:
    """The second half: wait for the trainer, add the index, sync, and give the folder its name."""
    partial, checkpoint = started.partial, started.checkpoint
    final = partial.with_name(f"{checkpoint.lineage}-{checkpoint.step:06d}")
    with _remove_on_error(partial):
        if started.finish is not None:
            started.finish()
        sums = _collect_hashes(partial)
        index = msgspec.json.encode(msgspec.structs.replace(checkpoint, sha256=sums))
        (partial / INDEX).write_bytes(index)
        for file in partial.iterdir():
            _fsync(file)
        _fsync(partial)
        if final.exists():
            shutil.rmtree(final)
    partial.rename(final)
    _fsync(final.parent)
    return WrittenCheckpoint(final, hashlib.sha256(index).hexdigest())


@contextmanager
def _remove_on_error(partial: Path) -> Iterator[None]:
    try:
        with detect_full_disk(partial.parent):
            yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _collect_hashes(folder: Path) -> dict[str, str]:
    """Of each file its SHA-256, by name: what stands beside it, where its writer made it, else made here."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.suffix != HASH_SUFFIX:
            beside = file.with_name(f"{file.name}{HASH_SUFFIX}")
            found[file.name] = beside.read_text() if beside.exists() else _hash_file(file)
            beside.unlink(missing_ok=True)
    return found


class CheckpointDamaged(Exception):
    """Raised when what lies there is no whole checkpoint, and will not become one."""


def hash_index(path: Path) -> str:
    """The SHA-256 of a checkpoint's index, which has those of its files: blocking."""
    return _hash_file(path / INDEX)


def open_checkpoint(path: Path, index_sha256: str = "") -> Checkpoint:
    """The checkpoint at ``path``, whose index has that SHA-256 (empty: nobody knows); blocking. Raises `OSError` when it cannot
    be read, as while its disk is away, and `CheckpointDamaged` when it was read and is not whole."""
    _expect_file(path, INDEX)
    if index_sha256 and hash_index(path) != index_sha256:
        raise CheckpointDamaged(f"{INDEX} is not the one that the log names")
    try:
        checkpoint = msgspec.json.decode((path / INDEX).read_bytes(), type=Checkpoint)
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{INDEX}: {error}") from error
    for name in checkpoint.sha256:
        _expect_file(path, name)
    broken = [name for name, digest in checkpoint.sha256.items() if _hash_file(path / name) != digest]
    if broken or not checkpoint.sha256:
        raise CheckpointDamaged(f"{', '.join(broken) or INDEX} differs from its checksum")
    return checkpoint


def find_origin(begin_with: str) -> Path | None:
    """The checkpoint of another run that one without checkpoints begins with, None for none. Blocking; raises `UserError`."""
    if not begin_with:
        return None
    path = Path(begin_with).expanduser()
    try:
        open_checkpoint(path)
    except (OSError, CheckpointDamaged) as error:
        raise UserError(f"learner.begin_with = {begin_with}: no whole checkpoint is there: {error}") from error
    return path


def _expect_file(folder: Path, name: str) -> None:
    """An index from elsewhere may name any path, and a pipe or a device would be read without end."""
    if "\0" in name or Path(name).name != name:
        raise CheckpointDamaged(f"{INDEX} names {name!r}, which is no file beside it")
    if (folder / name).exists() and not (folder / name).is_file():
        raise CheckpointDamaged(f"{name} is not a regular file")


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at ``path`` if it is whole, else None (and a line in the log)."""
    try:
        return open_checkpoint(path)
    except (OSError, CheckpointDamaged) as error:
        log.warning("checkpoint is unusable; skipping it", path=str(path), reason=str(error))
        return None


def prune_checkpoints(folder: Path, keep: int, is_voided: Callable[[str, int], bool] = lambda lineage, step: False) -> None:
    """Remove all checkpoints but the newest ``keep``, those of steps that do not count, and what kills left half written.

    Newest by lineage and step, as in the log: clocks and file times may go backwards. ``is_voided`` says what does not count;
    it stays until one that counts has come as far. Nothing is removed unless the newest that counts can be read.
    """
    try:
        found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:  # its disk is away since the checkpoint was written
        log.error("checkpoint folder is unreadable; keeping all checkpoints", folder=str(folder), reason=str(error))
        return
    whole = sorted((int(match["lineage"]), int(match["step"]), path) for match, path in found if not match["part"])
    counting = [each for each in whole if not is_voided(f"l{each[0]}", each[1])]
    if not counting or not is_there(counting[-1][2]):
        log.error("newest checkpoint is unreadable; keeping all checkpoints", folder=str(folder))
        return
    reached = counting[-1][1]
    kept = {path for _, _, path in counting[-keep:]}
    kept |= {each[2] for each in whole if each not in counting and each[1] > reached}
    for _, path in found:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[tuple[int, int, bool]]:
    """Of everything in a folder of checkpoints the number of its lineage, its step, and whether it was finished; in order."""
    if not folder.is_dir():
        return []
    found = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match["lineage"]), int(match["step"]), not match["part"]) for match in found)


def is_whole(path: Path, index_sha256: str = "") -> bool:
    """True if a checkpoint can be begun at. Blocking; what has not changed is not read again."""
    try:
        return _is_whole(path, index_sha256, (path / INDEX).stat().st_mtime_ns)
    except OSError:
        return False


@lru_cache(maxsize=256)
def _is_whole(path: Path, index_sha256: str, _changed_ns: int) -> bool:
    try:
        open_checkpoint(path, index_sha256)
    except CheckpointDamaged:
        return False
    return True


def is_there(path: Path) -> bool:
    """True if all files of a checkpoint are where it was written; it was synced, and its checksums made, when it was."""
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=Checkpoint)
        return all((path / name).stat().st_size for name in index.sha256)
    except (OSError, *UNREADABLE):
        return False


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
