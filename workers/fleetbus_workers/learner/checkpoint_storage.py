"""Stores checkpoints beside the training where the trainer can, one at a time, and publishes them when they are
whole."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from fleetbus.concurrency.runtime import Runtime
from fleetbus_schemas import CheckpointStored
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.checkpoints import (
    Checkpoint,
    StartedCheckpoint,
    WrittenCheckpoint,
    finish_checkpoint,
    prune_checkpoints,
    start_checkpoint,
    write_checkpoint,
)
from fleetbus_workers.learner.disk_full import retry_while_disk_full
from fleetbus_workers.learner.journal import FencedAppender

log = structlog.get_logger()


class CheckpointStorage:
    """Checkpoints of one lineage in ``folder``. ``pending`` is one that was not begun: its state is the trainer's now.
    ``restarts``: see `CheckpointStored`."""

    def __init__(
        self,
        appender: FencedAppender,
        trainer: Trainer,
        runtime: Runtime,
        *,
        folder: Path,
        keep: int,
        is_voided: Callable[[str, int], bool],
        restarts: tuple[str, ...] = (),
    ) -> None:
        self._appender = appender
        self._trainer = trainer
        self._runtime = runtime
        self._folder = folder
        self._restarts = restarts
        self._prune = partial(prune_checkpoints, folder, keep, is_voided)
        self._idle = anyio.Event()
        self._idle.set()
        self.pending: Checkpoint | None = None
        self.seconds = 0.0
        """For which training stood still."""

    async def start(self, tasks: TaskGroup) -> None:
        """Store the pending checkpoint, beside what follows if the trainer can; one before it is waited for."""
        began, checkpoint = anyio.current_time(), self._take_pending()
        await self._idle.wait()
        begun = await retry_while_disk_full(self._runtime, _begin, self._folder, checkpoint, self._trainer)
        if isinstance(begun, WrittenCheckpoint):
            await self._record(checkpoint, begun)
        else:
            self._idle = anyio.Event()
            tasks.start_soon(self._finish, begun)
        self.seconds += anyio.current_time() - began

    async def store(self) -> None:
        """Store the pending checkpoint, if there is one, and return when all of them are on the disk."""
        began = anyio.current_time()
        await self._idle.wait()
        if self.pending is not None:
            checkpoint = self._take_pending()
            written = await retry_while_disk_full(self._runtime, write_checkpoint, self._folder, checkpoint, self._trainer)
            await self._record(checkpoint, written)
        self.seconds += anyio.current_time() - began

    def _take_pending(self) -> Checkpoint:
        checkpoint, self.pending = self.pending, None
        assert checkpoint is not None
        return checkpoint

    async def _finish(self, started: StartedCheckpoint) -> None:
        try:
            written: WrittenCheckpoint = await self._runtime.offload(finish_checkpoint, started)
        except OSError as error:  # the trainer's state is another by now
            step = started.checkpoint.step
            log.error("checkpoint not written; keeping the one before it", step=step, reason=str(error))
        else:
            await self._record(started.checkpoint, written)
        finally:
            self._idle.set()

    async def _record(self, checkpoint: Checkpoint, written: WrittenCheckpoint) -> None:
        await self.announce(checkpoint, written)
        await self._runtime.offload(self._prune)

    async def announce(self, checkpoint: Checkpoint, written: WrittenCheckpoint) -> None:
        """Tell the log of a checkpoint that is on the disk."""
        await self._appender.append(
            CheckpointStored(
                lineage=checkpoint.lineage,
                step=checkpoint.step,
                version=checkpoint.version,
                file=str(written.path),
                sha256=written.index_sha256,
                floor=checkpoint.floor,
                first_open_group=checkpoint.first_open_group,
                restarts=self._restarts,
            )
        )


def _begin(folder: Path, checkpoint: Checkpoint, trainer: Trainer) -> StartedCheckpoint | WrittenCheckpoint:
    started = start_checkpoint(folder, checkpoint, trainer)
    return started if started.finish is not None else finish_checkpoint(started)
