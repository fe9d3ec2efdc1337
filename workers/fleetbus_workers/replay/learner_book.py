"""What learners published, lineage by lineage: the recorded messages that a replayed learner has to publish again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus_schemas import (
    CheckpointStored,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)
from fleetbus_schemas.message import MalformedMessage, decode_any

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


class Lineage(msgspec.Struct, kw_only=True):
    """What one learner published, in order, by what it is called. ``sequence`` is where it announced itself to learners,
    ``fence`` where it did to engines; from ``start`` steps of its parent it went on."""

    name: str
    started: LineageStarted
    sequence: int
    fence: int
    published: dict[Key, tuple[StreamEntry, Message]] = msgspec.field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.started.parent_step

    @property
    def steps(self) -> list[StepTrained]:
        return [message for _, message in self.published.values() if isinstance(message, StepTrained)]

    @property
    def last_step(self) -> int:
        """The newest step that it trained, or that it began from."""
        return max((step.step for step in self.steps), default=self.start)

    @property
    def is_whole(self) -> bool:
        """True if it trained to its last step."""
        return any(isinstance(message, TrainingFinished) for _, message in self.published.values())


def read_lineages(recording: Recording) -> list[Lineage]:
    """All lineages in order; raises `UserError` when the recording does not hold the beginning of the first."""
    found: dict[str, Lineage] = {}
    for entry in recording.entries:
        if entry.subject.split(".", 3)[2] not in ("task", "train", "policy"):
            continue
        try:
            message = decode_any(COMPARED, entry.payload, subject=entry.subject)
        except MalformedMessage:
            continue
        if isinstance(message, LineageStarted):
            _begin(found, entry, message, recording)
        elif not found:
            raise UserError(f"{recording.path} does not hold the beginning of the training: record the whole run")
        if (lineage := found.get(_lineage_of(message))) is not None:  # what others ask for is none of a learner's
            lineage.published.setdefault(key_of(entry.subject, message), (entry, message))
    if not found:
        raise UserError(f"{recording.path} holds nothing that a learner published: record the whole run, without --episode")
    return [*found.values()]


def _begin(found: dict[str, Lineage], entry: StreamEntry, message: LineageStarted, recording: Recording) -> None:
    if message.parent and not found:
        raise UserError(
            f"{recording.path} begins with lineage {message.lineage} of {message.parent}: record the run from its start"
        )
    known = found.get(message.lineage)
    if known is None:
        at = entry.sequence
        found[message.lineage] = Lineage(name=message.lineage, started=message, sequence=at, fence=at)
    else:
        known.fence = entry.sequence


def _lineage_of(message: Message) -> str:
    return str(getattr(message, "lineage", ""))


def settled_before(lineages: Sequence[Lineage], lineage: Lineage) -> set[str]:
    """Episodes that were trained or excluded for good when ``lineage`` began."""
    earlier = [each for each in lineages if each.sequence <= lineage.sequence]
    surviving = compute_surviving_steps([each.started for each in earlier])
    steps = [step for each in earlier[:-1] for step in each.steps if is_surviving(surviving, step.lineage, step.step)]
    return set(consumed_by(steps))


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
