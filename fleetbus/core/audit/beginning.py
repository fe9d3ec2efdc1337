"""The beginning of the books where a log's oldest entries were removed: what is taken as settled, and how much of it. Pure.

What an archive's retention removes was settled for good, so nothing of it is missed; but entries that follow speak of it, and
the books cannot say whether they are right to. They are counted, and the report says that these books prove only a part
(docs/decisions/0229-an-archive-forgets-what-nobody-needs.md).
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

import msgspec

from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    StepTrained,
    TrainingFinished,
)

EpisodeMessage = EpisodeRequested | AttemptStarted | AttemptReleased | Observation | Action | EpisodeFinished
Settling = TypeVar("Settling", StepTrained, TrainingFinished)


class Beginning(msgspec.Struct):
    """The books begin with the entry at ``sequence``; 1: with the first there ever was. ``entered`` entries and ``settled``
    episodes belong to what was removed."""

    sequence: int = 1
    entered: int = 0
    settled: int = 0

    @property
    def is_whole(self) -> bool:
        return self.sequence == 1

    def takes(self, message: EpisodeMessage) -> bool:
        """True, and counted, for an entry of an episode that is not in the books if its request may have been removed. Actions
        and releases do not say where their request stood."""
        match message:
            case EpisodeRequested():
                is_earlier = False
            case Action() | AttemptReleased():
                is_earlier = not self.is_whole
            case _:
                is_earlier = 0 < message.request_sequence < self.sequence
        self.entered += is_earlier
        return is_earlier

    def leave_out(self, entry: Settling, known: Container[str]) -> Settling:
        """The part of a step, or of the end of training, that settled ``known`` episodes; the others are counted."""
        if self.is_whole:
            return entry
        excluded = tuple(each for each in entry.excluded if each.episode_id in known)
        self.settled += len(entry.excluded) - len(excluded)
        if isinstance(entry, TrainingFinished):
            return msgspec.structs.replace(entry, excluded=excluded)
        trained = tuple(episode for episode in entry.episodes if episode in known)
        self.settled += len(entry.episodes) - len(trained)
        return msgspec.structs.replace(entry, episodes=trained, excluded=excluded)

    def list_unproven(self) -> tuple[str, ...]:
        """List what these books do not prove because of it."""
        if self.is_whole:
            return ()
        counts = {
            "episodes were settled whose requests were removed": self.settled,
            "entries are of episodes whose requests were removed": self.entered,
        }
        removed = f"anything of entries 1 to {self.sequence - 1}, which the archive's retention removed"
        return (removed, *(f"{count} {what}" for what, count in counts.items() if count))
