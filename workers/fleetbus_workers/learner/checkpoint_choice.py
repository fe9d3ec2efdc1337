"""Chooses the checkpoint that a lineage begins at: the newest that counts, or one that a person names. Below are their files.

A run that has a checkpoint never starts over by itself: it waits for a checkpoint that cannot be read, and a person decides.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.errors import UserError
from fleetbus_schemas import CheckpointStored, LineageStarted
from fleetbus_workers.learner.checkpoints import INDEX, Checkpoint, CheckpointDamaged, open_checkpoint

START = "start"
_ORDER = re.compile(r"(?P<step>start|\d+)(/\w+)?")

log = structlog.get_logger()


class CheckpointUnread(UserError):
    """No checkpoint that the log names can be read: its disk may be away, so that waiting may help."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The begin of the next lineage: after ``step`` of ``parent``. ``restart`` is the order of a person that it follows."""

    parent: str
    checkpoint: Checkpoint | None = None
    path: Path | None = None
    restart: str = ""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


async def choose_checkpoint(
    lineages: Sequence[LineageStarted],
    stored: Sequence[CheckpointStored],
    *,
    folder: Path | None,
    restart: str,
    runtime: Runtime,
) -> Choice:
    """The choice after what the log says; ``folder`` is where checkpoints lie if they do not where the log says.

    An order to ``restart`` that was followed before is not given here. Raises `CheckpointUnread`, and `UserError` for an order
    that makes no sense.
    """
    surviving = compute_surviving_steps(lineages)
    parent = lineages[-1].lineage if lineages else ""
    counting = [entry for entry in stored if is_surviving(surviving, entry.lineage, entry.step)]
    if restart:
        return await _choose_ordered(restart, parent, counting, stored, folder, runtime)
    if not counting:
        return Choice(parent=parent)
    checkpoint, path = await _find_newest_readable(counting, folder, runtime)
    return Choice(parent=parent, checkpoint=checkpoint, path=path)


async def _choose_ordered(
    restart: str,
    parent: str,
    counting: Sequence[CheckpointStored],
    stored: Sequence[CheckpointStored],
    folder: Path | None,
    runtime: Runtime,
) -> Choice:
    """Choose what a person names; a checkpoint of a lineage that was cut makes that lineage the parent."""
    order = _ORDER.fullmatch(restart)
    if order is None:
        raise UserError(f"learner.restart_from = {restart}: give a step that has a checkpoint, or `{START}`")
    if order["step"] == START:
        return Choice(parent=parent, restart=restart)
    named = [entry for entry in stored if entry.step == int(order["step"])]
    if not named:
        raise UserError(f"learner.restart_from = {restart}: the log names checkpoints of {_format_steps(stored) or 'no step'}")
    found = [entry for entry in named if entry in counting] or named
    checkpoint, path = await _find_newest_readable(found, folder, runtime)
    return Choice(
        parent=parent if found[-1] in counting else checkpoint.lineage, checkpoint=checkpoint, path=path, restart=restart
    )


async def _find_newest_readable(
    entries: Sequence[CheckpointStored], folder: Path | None, runtime: Runtime
) -> tuple[Checkpoint, Path]:
    """Damaged ones are passed over, for they stay so; one that is not there is not: older ones would be begun at for ever."""
    reason = ""
    for entry in reversed(entries):
        try:
            return await _open_checkpoint(entry, folder, runtime)
        except CheckpointDamaged as damaged:
            log.warning("checkpoint is damaged; trying an older one", path=entry.file, reason=str(damaged))
            reason = reason or f"{entry.file} is damaged: {damaged}"
        except OSError as error:
            reason = reason or f"{entry.file} cannot be read ({error.strerror or error})"
            break
    there = _format_steps([entry for entry in entries if _locate(entry, folder).joinpath(INDEX).is_file()])
    raise CheckpointUnread(
        f"the checkpoint of step {entries[-1].step}: {reason}; mount or restore it, or choose where to resume: "
        f"--restart-from {' | '.join(filter(None, (there, START)))}"
    )


async def _open_checkpoint(entry: CheckpointStored, folder: Path | None, runtime: Runtime) -> tuple[Checkpoint, Path]:
    path = _locate(entry, folder)
    checkpoint = await runtime.offload(open_checkpoint, path)
    assert isinstance(checkpoint, Checkpoint)
    if (checkpoint.lineage, checkpoint.step) != (entry.lineage, entry.step):
        raise CheckpointDamaged(f"it is step {checkpoint.step} of {checkpoint.lineage}")
    return checkpoint, path


def _locate(entry: CheckpointStored, folder: Path | None) -> Path:
    """The path that the log names, or the same name in the run's folder, which may have been moved."""
    path = Path(entry.file)
    moved = folder / path.name if folder is not None else path
    return moved if moved.exists() and not path.exists() else path


def _format_steps(entries: Sequence[CheckpointStored]) -> str:
    return " | ".join(map(str, sorted({entry.step for entry in entries})))
