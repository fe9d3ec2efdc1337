"""The messages of learners, lineage by lineage: the recorded ones that a replayed learner has to publish again. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.joined_policies import JoinedPolicies
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.errors import UserError
from fleetbus.log.episodes import read_entry
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
from fleetbus_schemas.channels import STORED

KINDS = ("task", "train", "policy")
"""Kinds of subjects that a learner publishes on."""

Key = tuple[str, ...]


class Lineage(msgspec.Struct, kw_only=True):
    """The messages that one learner published, in order and by key. ``sequence`` is the position of its start on ``train``,
    ``fence`` that on ``policy``; its first step follows step ``start`` of its parent. ``operator_requests`` counts episodes
    that others asked for under its name."""

    name: str
    started: LineageStarted
    sequence: int
    fence: int
    published: dict[Key, tuple[StreamEntry, Message]] = msgspec.field(default_factory=dict)
    operator_requests: int = 0

    @property
    def start(self) -> int:
        return self.started.parent_step

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """The learner's own settings by table; empty in recordings of learners that did not publish them."""
        return self.started.settings

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.published.values()]

    @property
    def steps(self) -> list[StepTrained]:
        return [message for message in self.messages if isinstance(message, StepTrained)]

    @property
    def last_step(self) -> int:
        """The newest step that it trained, or that it began from."""
        return max((step.step for step in self.steps), default=self.start)

    @property
    def is_whole(self) -> bool:
        """True if it trained to its last step."""
        return any(isinstance(message, TrainingFinished) for message in self.messages)


def read_lineages(recording: Recording, joined: str = "") -> list[Lineage]:
    """All lineages of the run's own policy in order, or of the one that ``joined``, which asks for no episodes. Raises
    `UserError` when the recording does not hold the beginning of the first."""
    found: dict[str, Lineage] = {}
    others = JoinedPolicies()
    for entry in recording.entries:
        kind = entry.subject.split(".", 3)[2]
        message = read_entry(STORED[kind], entry) if kind in KINDS else None
        if message is None or is_of_another(entry.subject, message, others, joined):
            continue
        if isinstance(message, LineageStarted):
            if message.parent and not found:
                name = f"lineage {message.lineage} of {message.parent}"
                raise UserError(f"{recording.path} begins with {name}: record the run from its start")
            at = entry.sequence
            known = found.setdefault(message.lineage, Lineage(name=message.lineage, started=message, sequence=at, fence=at))
            known.fence = at
        elif not found:
            raise UserError(f"{recording.path} does not contain the beginning of the training: record the whole run")
        lineage = found.get(getattr(message, "lineage", ""))
        if lineage is None:
            continue
        if isinstance(message, EpisodeRequested) and not is_requested_by_learner(message):
            lineage.operator_requests += 1
        else:
            lineage.published.setdefault(key_of(entry.subject, message), (entry, message))
    if not found:
        raise UserError(f"{recording.path} contains no messages of a learner: record the whole run, without --episode")
    return [*found.values()]


def is_of_another(subject: str, message: Message | None, others: JoinedPolicies, joined: str) -> bool:
    """True for what another learner published than that of the policy that ``joined``, empty: than the one that asks."""
    return subject.split(".")[3:] != [joined] if joined else others.covers(subject, message)


def is_requested_by_learner(request: EpisodeRequested) -> bool:
    """False for episodes that others ask for, as `fleetbus evaluate` does: a learner's evaluations begin with its lineage."""
    return bool(request.lineage) and (request.split == "train" or request.group_id.startswith(f"{request.lineage}-"))


def find_settled(lineages: Sequence[Lineage], lineage: Lineage) -> set[str]:
    """Episodes that were trained or excluded for good when ``lineage`` began."""
    earlier = [each for each in lineages if each.sequence <= lineage.sequence]
    surviving = compute_surviving_steps([each.started for each in earlier])
    steps = [step for each in earlier[:-1] for step in each.steps if is_surviving(surviving, step.lineage, step.step)]
    return set(map_to_steps(steps))


def key_of(subject: str, message: Message) -> Key:
    """The key of a message among those of its lineage, in the recording and in the replay."""
    match message:
        case EpisodeRequested():
            name = message.episode_id
        case PolicyPublished():
            named_for = subject.rpartition(".")[2]
            name = f"version {message.version}" + (f", the first of {named_for}" if named_for != message.policy else "")
        case StepTrained() | CheckpointStored() | TrainingFinished():
            name = f"step {message.step}"
        case EvaluationFinished():
            name = message.name
        case _:
            name = subject.split(".", 3)[2]
    return (type(message).__name__, name)


def map_to_steps(steps: Sequence[StepTrained]) -> dict[str, int]:
    """The step that trained or excluded each episode."""
    consumed: dict[str, int] = {}
    for step in steps:
        for episode_id in (*step.episodes, *(each.episode_id for each in step.excluded)):
            consumed.setdefault(episode_id, step.step)
    return consumed


def find_optional(lineage: Lineage) -> set[Key]:
    """Requests after the last recorded step of a lineage that was cut: some follow from what the step after it took, which is
    unknown."""
    if lineage.is_whole:
        return set()
    last = max((entry.sequence for entry, message in lineage.published.values() if isinstance(message, StepTrained)), default=0)
    return {
        key
        for key, (entry, message) in lineage.published.items()
        if isinstance(message, EpisodeRequested) and entry.sequence > last
    }
