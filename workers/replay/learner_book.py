"""What a learner published, by what it is called: the recorded messages that a replayed learner has to publish again."""

from __future__ import annotations

from collections.abc import Sequence

from fleetbus.bus.base import Stored
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from schemas import (
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)
from schemas.message import MalformedMessage, decode_any

COMPARED: tuple[type[Message], ...] = (
    EpisodeRequested,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    CheckpointStored,
    EvaluationFinished,
    TrainingFinished,
)
"""Everything that a learner publishes."""

Key = tuple[str, ...]


def first_lineage(recording: Recording) -> dict[Key, tuple[Stored, Message]]:
    """What the first lineage published, in order, by what it is called; raises `UserError`."""
    found: dict[Key, tuple[Stored, Message]] = {}
    lineage = ""
    for entry in recording.entries:
        if entry.subject.split(".", 3)[2] not in ("task", "train", "policy"):
            continue
        try:
            message = decode_any(COMPARED, entry.payload, subject=entry.subject)
        except MalformedMessage:
            continue
        if isinstance(message, LineageStarted):
            if lineage and message.lineage != lineage:
                break
            lineage = message.lineage
            if message.parent:
                raise UserError(
                    f"{recording.path} begins with lineage {lineage} of {message.parent}: record the run from its start"
                )
        if not lineage:
            raise UserError(f"{recording.path} does not hold the beginning of the training: record the whole run")
        if isinstance(message, EpisodeRequested) and message.lineage != lineage:
            continue  # another client's
        found.setdefault(key_of(entry.subject, message), (entry, message))
    if not found:
        raise UserError(f"{recording.path} holds nothing that a learner published: record the whole run, without --episode")
    return found


def key_of(subject: str, message: Message) -> Key:
    kind = type(message).__name__
    match message:
        case EpisodeRequested():
            return (kind, message.episode_id)
        case PolicyPublished():
            return (kind, f"version {message.version}")
        case StepTrained() | CheckpointStored() | TrainingFinished():
            return (kind, f"step {message.step}")
        case EvaluationFinished():
            return (kind, message.name)
    return (kind, subject.split(".", 3)[2])


def consumed_by(steps: Sequence[StepTrained]) -> dict[str, int]:
    """The step that trained or excluded each episode."""
    consumed: dict[str, int] = {}
    for step in steps:
        for episode_id in (*step.episodes, *(each.episode_id for each in step.excluded)):
            consumed.setdefault(episode_id, step.step)
    return consumed
