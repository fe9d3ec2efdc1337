"""Which observations and actions of the log are no longer needed: a fold of the log for trimming. Pure.

An episode is settled when training consumed or excluded it by a step that the newest surviving checkpoint covers, so that a
learner that resumes there never asks for it; an episode that no learner trains (an evaluation, or asked for by somebody else),
when it has a result. Everything else is kept.
"""

from __future__ import annotations

import msgspec

from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus_schemas import CheckpointStored, EpisodeFinished, EpisodeRequested, LineageStarted, Message, StepTrained

CONTENT = frozenset({"obs", "act"})
"""Kinds of subjects that are trimmed; everything else stays in the log for good."""


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    lineage: str
    step: int
    episodes: tuple[str, ...]


class _Training:
    """Steps of one ``train.<name>`` that no checkpoint covers yet."""

    def __init__(self) -> None:
        self._lineages: list[LineageStarted] = []
        self._steps: list[_Step] = []

    def on_lineage(self, started: LineageStarted) -> None:
        """What the lineage before trained after its parent step is void: those episodes will be asked for again."""
        self._lineages.append(started)
        surviving = compute_surviving_steps(self._lineages)
        self._steps = [step for step in self._steps if is_surviving(surviving, step.lineage, step.step)]

    def on_step(self, step: StepTrained) -> None:
        ids = step.episodes + tuple(exclusion.episode_id for exclusion in step.excluded)
        self._steps.append(_Step(lineage=step.lineage, step=step.step, episodes=ids))

    def on_checkpoint(self, checkpoint: CheckpointStored) -> list[str]:
        """The episodes that are settled from now on."""
        surviving = compute_surviving_steps(self._lineages)
        if not is_surviving(surviving, checkpoint.lineage, checkpoint.step):
            return []
        covered = [step for step in self._steps if self._covers(checkpoint, step, surviving)]
        self._steps = [step for step in self._steps if step not in covered]
        return [episode for step in covered for episode in step.episodes]

    def _covers(self, checkpoint: CheckpointStored, step: _Step, surviving: dict[str, float]) -> bool:
        return step.step <= checkpoint.step and is_surviving(surviving, step.lineage, step.step)


class Retention:
    """Enter every entry of the log in order; memory grows with the episodes that are not settled."""

    def __init__(self) -> None:
        self._first_content: dict[str, int] = {}
        self._untrained_by_learner: set[str] = set()
        self._training: dict[str, _Training] = {}

    def __len__(self) -> int:
        """Episodes that are requested and not settled."""
        return len(self._first_content)

    def enter(self, sequence: int, subject: str, message: Message | None) -> None:
        """One entry; ``message`` is needed for requests, results and training entries only."""
        tokens = subject.split(".")
        if tokens[2] in CONTENT:
            if self._first_content.get(tokens[-1], 0) < 0:
                self._first_content[tokens[-1]] = sequence
            return
        match message:
            case EpisodeRequested():
                self._first_content.setdefault(message.episode_id, -sequence)  # none yet: negative, and where it can begin
                if message.split == "eval" or not message.lineage:
                    self._untrained_by_learner.add(message.episode_id)
            case EpisodeFinished() if message.episode_id in self._untrained_by_learner:
                self._untrained_by_learner.remove(message.episode_id)
                self._first_content.pop(message.episode_id, None)
            case LineageStarted() if tokens[2] == "train":
                self._get_training(tokens[-1]).on_lineage(message)
            case StepTrained():
                self._get_training(tokens[-1]).on_step(message)
            case CheckpointStored():
                for episode in self._get_training(tokens[-1]).on_checkpoint(message):
                    self._first_content.pop(episode, None)

    def mark_content_skipped(self) -> None:
        """Observations and actions up to here were not entered: what is needed may begin right after its request."""
        for episode, first in self._first_content.items():
            self._first_content[episode] = abs(first)

    def is_settled(self, subject: str) -> bool:
        """True if an entry on this subject of an episode is no longer needed: it is settled, or was never requested."""
        return subject.rpartition(".")[2] not in self._first_content

    def limit(self, last_sequence: int) -> int:
        """The last sequence, up to ``last_sequence``, before any content that is needed."""
        return min((first - 1 for first in self._first_content.values() if first > 0), default=last_sequence)

    def _get_training(self, name: str) -> _Training:
        return self._training.setdefault(name, _Training())
