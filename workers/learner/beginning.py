"""Where a learner begins: from nothing, or from the newest whole checkpoint of the lineage that survives (delivery rule 8).

Read from the log alone; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetbus.bus.base import Bus
from fleetbus.core.lineage import survives, surviving_steps
from fleetbus.episodes import decoded
from schemas import (
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    Subjects,
    TrainingFinished,
)
from schemas.message import MalformedMessage, decode_any
from workers.learner.checkpoints import Checkpoint, read_checkpoint


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's training, and what the next lineage starts from."""

    lineage: str
    parent: str
    train_last: int
    evaluated: frozenset[str]
    finished_step: int
    checkpoint: Checkpoint | None
    checkpoint_path: Path | None

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def floor(self) -> int:
        return self.checkpoint.floor if self.checkpoint else 1


async def find_beginning(bus: Bus, subjects: Subjects, policy: str) -> Beginning:
    """Fold ``train.<policy>``."""
    train = await bus.history([subjects.train(policy)])
    entries = [entry for stored in train if (entry := _entry(stored.subject, stored.payload)) is not None]
    lineages = [entry for entry in entries if isinstance(entry, LineageStarted)]
    checkpoint, path = _newest_whole(entries, surviving_steps(lineages))
    return Beginning(
        lineage=f"l{len(lineages) + 1}",
        parent=lineages[-1].lineage if lineages else "",
        train_last=train[-1].sequence if train else 0,
        evaluated=frozenset(entry.name for entry in entries if isinstance(entry, EvaluationFinished)),
        finished_step=entries[-1].step if entries and isinstance(entries[-1], TrainingFinished) else -1,
        checkpoint=checkpoint,
        checkpoint_path=path,
    )


async def published_versions(bus: Bus, subjects: Subjects, policy: str) -> dict[int, int]:
    """The step of every version that was published so far; final only once the learner before can publish no more."""
    entries = decoded(PolicyPublished, await bus.history([subjects.policy(policy)]), beside=(LineageStarted,))
    return {published.version: published.step for _, published in entries}


async def requests_from_floor(
    bus: Bus, subjects: Subjects, pool: str, beginning: Beginning
) -> list[tuple[int, EpisodeRequested]]:
    """Training requests in the log from the checkpoint's floor on, settled ones among them, with their positions."""
    entries = [entry async for entry in bus.scan([subjects.tasks(pool)], start=beginning.floor)]
    return [(entry.sequence, request) for entry, request in decoded(EpisodeRequested, entries) if request.split == "train"]


def _entry(subject: str, payload: bytes) -> Message | None:
    try:
        return decode_any(
            (LineageStarted, StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished), payload, subject=subject
        )
    except MalformedMessage:
        return None


def _newest_whole(entries: Sequence[Message], surviving: dict[str, float]) -> tuple[Checkpoint | None, Path | None]:
    for entry in reversed(entries):
        if isinstance(entry, CheckpointStored) and survives(surviving, entry.lineage, entry.step):
            path = Path(entry.file)
            checkpoint = read_checkpoint(path)
            if checkpoint is not None:
                return checkpoint, path
    return None, None
