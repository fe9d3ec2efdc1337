"""Faults to plant into the learner, its files and the recorder. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

import fleetbus.log.actions as actions
import fleetbus_workers.learner.journal as book
import fleetbus_workers.learner.pool as pool
import fleetbus_workers.learner.publication as publication
import fleetbus_workers.learner.resume as resume
from fleetbus.core.training.ledger import Ledger
from fleetbus.core.training.retention import Retention
from fleetbus.log.archive_writer import ArchiveWriter
from fleetbus_schemas import Task
from fleetbus_workers.learner.checkpoint_choice import CheckpointUnread, Choice, choose_checkpoint
from fleetbus_workers.learner.checkpoint_storage import CheckpointStorage
from fleetbus_workers.learner.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.store import BusStore, FolderStore


def settled_as_of_the_checkpoint_instead_of_the_step(patch: pytest.MonkeyPatch) -> None:
    """What was discarded since the step is settled in the checkpoint, although no step has recorded it."""
    settle, take, used = pool.GroupPool.settle, CheckpointStorage._take_pending, list[pool.GroupPool]()

    def faulty(self: pool.GroupPool, groups: Any) -> Any:
        used[:] = [self]
        return settle(self, groups)

    def take_later(self: CheckpointStorage) -> Checkpoint:
        pending = take(self)
        discarded = tuple(exclusion.episode_id for group in used[0]._excluded for exclusion in group)
        return msgspec.structs.replace(pending, settled=pending.settled + discarded)

    patch.setattr(pool.GroupPool, "settle", faulty)
    patch.setattr(CheckpointStorage, "_take_pending", take_later)


def newest_file_instead_of_the_log(patch: pytest.MonkeyPatch) -> None:
    """Resume follows the newest checkpoint that lies in the folder, whether or not the log names it."""
    choose = resume.choose_checkpoint  # type: ignore[attr-defined]

    async def faulty(lineages: Any, stored: Any, *, folder: Any, **options: Any) -> Choice:
        choice = await choose(lineages, stored, folder=folder, **options)
        written = [f"l{number}-{step:06d}" for number, step, whole in list_checkpoints(folder) if whole]
        checkpoint = read_checkpoint(folder / written[-1]) if written else None
        if checkpoint is None or choice.restart:
            return choice
        return msgspec.structs.replace(choice, checkpoint=checkpoint, path=folder / written[-1])

    patch.setattr(resume, "choose_checkpoint", faulty)


def no_compare_and_set_of_steps(patch: pytest.MonkeyPatch) -> None:
    """A learner writes whatever stands last on its subject."""

    async def faulty(self: book.FencedAppender, payload: bytes) -> int:
        self.last = (await self._bus.publish(self._subject, payload)).sequence
        return self.last

    patch.setattr(book.FencedAppender, "_publish", faulty)


def staleness_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool.GroupPool, "lag", lambda self, group, step: 0)


def replaced_learner_not_told(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: book.FencedAppender) -> None:
        await anyio.sleep_forever()

    patch.setattr(book.FencedAppender, "watch", faulty)


def versions_read_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: publication.Publication, started: Any) -> dict[int, Any]:
        versions = await publication.read_published_versions(self._bus, self._subjects, self._policy)  # type: ignore[attr-defined]
        await anyio.sleep(1)
        await self._appender.take_over(started)
        self.version = max(versions, default=-1)
        return versions

    patch.setattr(publication.Publication, "fence", faulty)


def trimmed_content_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """Who reads Actions after the recorder has removed them knows of no archive."""
    patch.setattr(actions, "read_archived_entries", lambda folder, sequences, run: {})


def unreadable_checkpoint_means_the_start(patch: pytest.MonkeyPatch) -> None:
    """A learner that cannot read any checkpoint begins at step 0 by itself."""
    choose = choose_checkpoint

    async def faulty(lineages: Any, stored: Any, **options: Any) -> Choice:
        try:
            return await choose(lineages, stored, **options)
        except CheckpointUnread:
            return Choice(parent=lineages[-1].lineage if lineages else "")

    patch.setattr(resume, "choose_checkpoint", faulty)


def fresh_weights_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScriptedTrainer, "restore", lambda self, folder: None)


def exclusions_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a step left out is settled, and recorded nowhere."""
    settle = pool.GroupPool.settle

    def faulty(self: pool.GroupPool, groups: Any) -> Any:
        return settle(self, groups)[0], []

    patch.setattr(pool.GroupPool, "settle", faulty)


def floor_above_open_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "floor", property(lambda self: self._known + 1))


def single_episodes_trained(patch: pytest.MonkeyPatch) -> None:
    """A group of which one episode was graded is trained, although nothing can be compared."""
    init = pool.GroupPool.__init__

    def faulty(self: pool.GroupPool, ledger: Any, **options: Any) -> None:
        init(self, ledger, **options | {"minimum": 1})

    patch.setattr(pool.GroupPool, "__init__", faulty)


def unsettled_content_trimmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retention, "limit", lambda self, last_sequence: last_sequence)
    patch.setattr(Retention, "is_settled", lambda self, subject: True)


def archive_loses_an_entry(patch: pytest.MonkeyPatch) -> None:
    """The last entry of a batch is not written."""
    append = ArchiveWriter.append

    def faulty(self: ArchiveWriter, entries: Any) -> None:
        append(self, entries[:-1] if len(entries) > 1 else entries)

    patch.setattr(ArchiveWriter, "append", faulty)


def failed_sync_ignored(patch: pytest.MonkeyPatch) -> None:
    """The archive goes on behind what a failing disk tore."""
    append = ArchiveWriter.append

    def faulty(self: ArchiveWriter, entries: Any) -> None:
        try:
            append(self, entries)
        except OSError:
            self.last = entries[-1]

    patch.setattr(ArchiveWriter, "append", faulty)


def first_weights_uploaded_again(patch: pytest.MonkeyPatch) -> None:
    """What is announced as a new version are the weights of the first one."""
    first: list[Any] = []
    put_object, put_file = BusStore.put, FolderStore.put

    async def faulty_object(self: BusStore, file: Any) -> str:
        first.append(file) if not first or first[0].parent != file.parent else None
        if first[0].exists():
            file.write_bytes(first[0].read_bytes())
        return await put_object(self, file)

    async def faulty_file(self: FolderStore, file: Any) -> str:
        first.append(file) if not first or first[0].parent != file.parent else None
        if first[0].exists():
            file.write_bytes(first[0].read_bytes())
        return await put_file(self, file)

    patch.setattr(BusStore, "put", faulty_object)
    patch.setattr(FolderStore, "put", faulty_file)


def tasks_begin_anew_with_each_learner(patch: pytest.MonkeyPatch) -> None:
    """A learner counts the groups that it has asked for itself: the first tasks are trained again and again."""
    task = Curriculum.task

    def faulty(self: Curriculum, number: int) -> Task:
        first = vars(self).setdefault("first_number", number)
        return task(self, max(number - first, 0))

    patch.setattr(Curriculum, "task", faulty)


def version_announced_before_its_step(patch: pytest.MonkeyPatch) -> None:
    """The version goes out under the step before."""
    publish = publication.Publication.publish

    async def faulty(self: publication.Publication, step: int) -> int:
        return await publish(self, max(step - 1, 0))

    patch.setattr(publication.Publication, "publish", faulty)
