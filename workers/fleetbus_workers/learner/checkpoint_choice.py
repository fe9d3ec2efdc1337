"""Chooses the checkpoint that a lineage begins at: the newest that counts, or the one that a person names
(docs/concepts/delivery.md, rule 11).

A run that has a checkpoint never starts over by itself: it waits for a checkpoint that cannot be read, and a person decides.
Below are the files, of which a log that went back in time names only some.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.errors import UserError
from fleetbus_schemas import CheckpointStored, LineageStarted
from fleetbus_workers.learner.checkpoints import Checkpoint, CheckpointDamaged, is_whole, open_checkpoint

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
    unnamed: Sequence[CheckpointStored] = (),
) -> Choice:
    """The choice after what the log says; ``folder`` is where checkpoints lie if they do not where the log says, ``unnamed``
    are those in it that the log does not name: a person may.

    An order to ``restart`` that was followed before is not given here. Raises `CheckpointUnread`, and `UserError` for an order
    that makes no sense.
    """
    surviving = compute_surviving_steps(lineages)
    parent = lineages[-1].lineage if lineages else ""
    counting = [entry for entry in stored if is_surviving(surviving, entry.lineage, entry.step)]
    shelf = _Shelf(folder, [*stored, *unnamed], runtime)
    if restart:
        return await _choose_ordered(restart, parent, counting, stored, shelf)
    if not counting:
        return Choice(parent=parent)
    checkpoint, path = await shelf.open_newest(counting)
    return Choice(parent=parent, checkpoint=checkpoint, path=path)


async def list_orders(entries: Sequence[CheckpointStored], folder: Path, runtime: Runtime) -> tuple[str, ...]:
    """Values that ``--restart-from`` can be given: the steps of whole checkpoints, the newest first, and the start."""
    return await _Shelf(folder, entries, runtime).list_orders()


async def _choose_ordered(
    restart: str,
    parent: str,
    counting: Sequence[CheckpointStored],
    stored: Sequence[CheckpointStored],
    shelf: _Shelf,
) -> Choice:
    """Choose what a person names; a checkpoint of a lineage that was cut, or lost, makes that lineage the parent."""
    order = _ORDER.fullmatch(restart)
    if order is None:
        raise UserError(f"learner.restart_from = {restart}: give a step that has a checkpoint, or `{START}`")
    if order["step"] == START:
        return Choice(parent=parent, restart=restart)
    named = [entry for entry in shelf.entries if entry.step == int(order["step"])]
    if not named:
        orders = " | ".join(await shelf.list_orders())
        raise UserError(f"learner.restart_from = {restart}: that step has no checkpoint; choose from: {orders}")
    found = next(filter(None, ([entry for entry in named if entry in each] for each in (counting, stored, named))))
    checkpoint, path = await shelf.open_newest(found)
    return Choice(
        parent=parent if found[-1] in counting else checkpoint.lineage, checkpoint=checkpoint, path=path, restart=restart
    )


class _Shelf:
    """The checkpoints of a run, in the order of the log, with those that it does not name behind them."""

    def __init__(self, folder: Path | None, entries: Sequence[CheckpointStored], runtime: Runtime) -> None:
        self._folder = folder
        self._runtime = runtime
        self.entries = entries

    async def open_newest(self, entries: Sequence[CheckpointStored]) -> tuple[Checkpoint, Path]:
        """Damaged ones are passed over, for they stay so; one that is not there is not: older ones would be begun at for
        ever. Raises `CheckpointUnread`."""
        reason = ""
        for entry in reversed(entries):
            try:
                return await self._open(entry)
            except CheckpointDamaged as damaged:
                log.warning("checkpoint is damaged; trying an older one", path=entry.file, reason=str(damaged))
                reason = reason or f"{entry.file} is damaged: {damaged}"
            except OSError as error:
                reason = reason or f"{entry.file} cannot be read ({error.strerror or error})"
                break
        raise CheckpointUnread(
            f"the checkpoint of step {entries[-1].step}: {reason}; mount or restore it, or choose where to resume: "
            f"--restart-from {' | '.join(await self.list_orders())}"
        )

    async def list_orders(self) -> tuple[str, ...]:
        """The steps of whole checkpoints, the newest first, and the start."""
        whole = set()
        for entry in self.entries:
            if entry.step not in whole and await self._runtime.offload(is_whole, _locate(entry, self._folder), entry.sha256):
                whole.add(entry.step)
        return (*map(str, sorted(whole, reverse=True)), START)

    async def _open(self, entry: CheckpointStored) -> tuple[Checkpoint, Path]:
        path = _locate(entry, self._folder)
        checkpoint = await self._runtime.offload(open_checkpoint, path, entry.sha256)
        assert isinstance(checkpoint, Checkpoint)
        if (checkpoint.lineage, checkpoint.step) != (entry.lineage, entry.step):
            raise CheckpointDamaged(f"it is step {checkpoint.step} of {checkpoint.lineage}")
        if entry.floor and not entry.sha256 and checkpoint.floor != entry.floor:
            raise CheckpointDamaged(f"its floor is {checkpoint.floor}, and the log says {entry.floor}")
        return (checkpoint.limit_floor(entry.floor) if entry.floor else checkpoint), path


def _locate(entry: CheckpointStored, folder: Path | None) -> Path:
    """The path that the log names, or the same name in the run's folder, which may have been moved."""
    path = Path(entry.file)
    moved = folder / path.name if folder is not None else path
    return moved if moved.exists() and not path.exists() else path
