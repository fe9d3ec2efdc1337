"""Where a learner resumes: at step 0, or at the newest complete checkpoint of the surviving lineage (delivery rule 8).

Read from the log alone; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetbus.bus.base import Bus
from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus.episodes import decode_entries
from fleetbus.runtime import Runtime
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    Subjects,
    TrainingFinished,
)
from fleetbus_schemas.message import MalformedMessage, decode_any
from fleetbus_schemas.stored import STORED
from fleetbus_workers.learner.checkpoints import Checkpoint, read_checkpoint


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's training, and what the next lineage starts from; ``evaluated``: evaluations that count, by name."""

    lineage: str
    parent: str
    train_last: int
    evaluated: frozenset[str]
    finished_step: int
    checkpoint: Checkpoint | None
    checkpoint_path: Path | None
    counted: dict[str, float] = msgspec.field(default_factory=dict)
    """Of each lineage so far the last step that counted, before this one begins; -1 if none did."""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def floor(self) -> int:
        return self.checkpoint.floor if self.checkpoint else 1

    def is_voided(self, lineage: str, step: int) -> bool:
        """True for a step so far that does not count any more, so that no learner will ever begin there."""
        return lineage in self.counted and step > min(self.counted[lineage], self.step)


async def find_resume_point(bus: Bus, subjects: Subjects, policy: str, *, runtime: Runtime | None = None) -> ResumePoint:
    """Fold ``train.<policy>``, entry by entry: months of steps would not fit into memory."""
    lineages: list[LineageStarted] = []
    checkpoints: list[CheckpointStored] = []
    evaluations: list[EvaluationFinished] = []
    last: Message | None = None
    train_last = 0
    async for stored in bus.scan([subjects.train(policy)]):
        train_last = stored.sequence
        entry = _decode_entry(stored.subject, stored.payload)
        last = entry or last
        match entry:
            case LineageStarted():
                lineages.append(entry)
            case CheckpointStored():
                checkpoints.append(entry)
            case EvaluationFinished():
                evaluations.append(entry)
    surviving = compute_surviving_steps(lineages)
    checkpoint, path = await _find_newest_checkpoint(checkpoints, surviving, runtime or Runtime())
    step = checkpoint.step if checkpoint else 0
    counted = {started.lineage: surviving.get(started.lineage, -1.0) for started in lineages}
    return ResumePoint(
        lineage=f"l{len(lineages) + 1}",
        parent=lineages[-1].lineage if lineages else "",
        train_last=train_last,
        evaluated=frozenset(each.name for each in evaluations if each.step <= min(counted.get(each.lineage, -1.0), step)),
        finished_step=last.step if isinstance(last, TrainingFinished) else -1,
        checkpoint=checkpoint,
        checkpoint_path=path,
        counted=counted,
    )


async def read_published_versions(bus: Bus, subjects: Subjects, policy: str) -> dict[int, int]:
    """The step of every version that was published so far; final only once the learner before can publish no more."""
    steps: dict[int, int] = {}
    async for entry in bus.scan([subjects.policy(policy)]):  # one at a time: each holds the manifest of a whole model
        for _, published in decode_entries(PolicyPublished, [entry], beside=(LineageStarted,)):
            steps[published.version] = published.step
    return steps


async def read_requests_from_floor(
    bus: Bus, subjects: Subjects, pool: str, resume_point: ResumePoint
) -> list[tuple[int, EpisodeRequested]]:
    """The learners' training requests in the log from the checkpoint's floor on, settled ones among them, with their positions.

    Anybody may ask for an episode; what no lineage asked for is no group of ours.
    """
    entries = [entry async for entry in bus.scan([subjects.tasks(pool)], start=resume_point.floor)]
    found = [(entry.sequence, request) for entry, request in decode_entries(EpisodeRequested, entries)]
    return [(sequence, request) for sequence, request in found if request.split == "train" and request.lineage]


def _decode_entry(subject: str, payload: bytes) -> Message | None:
    try:
        return decode_any(STORED["train"], payload, subject=subject)
    except MalformedMessage:
        return None


async def _find_newest_checkpoint(
    stored: Sequence[CheckpointStored], surviving: dict[str, float], runtime: Runtime
) -> tuple[Checkpoint | None, Path | None]:
    for entry in reversed(stored):
        if is_surviving(surviving, entry.lineage, entry.step):
            path = Path(entry.file)
            checkpoint = await runtime.offload(read_checkpoint, path)
            if checkpoint is not None:
                return checkpoint, path
    return None, None
