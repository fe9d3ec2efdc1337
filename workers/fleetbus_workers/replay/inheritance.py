"""What a learner finds that goes on where another ended: the book so far, open requests, and the checkpoint.

The book and the requests are those of the recording. Of the checkpoint only what trainers wrote is made by the replay of the
lineages before, and lies in the replay's own folder; what else is in it follows from the recording, whose order of requests a
replay does not repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.lineage import compute_surviving_steps, is_surviving
from fleetbus.recording import Recording
from fleetbus_schemas import CheckpointStored, EpisodeRequested
from fleetbus_schemas.message import MalformedMessage, decode_any
from fleetbus_workers.learner.admission import parse_group_number
from fleetbus_workers.learner.checkpoints import INDEX, Checkpoint, read_checkpoint
from fleetbus_workers.replay.learner_book import COMPARED, Lineage, settled_before
from fleetbus_workers.replay.stage import Stage
from fleetbus_workers.replay.told import Told

WHOLE_LOG = 1
"""Only what stands above the recorded floor is put into a stage, so its floor is the beginning."""


class Inheritance:
    """What ``lineage`` found when it began; ``checkpoints`` is the replay's folder of them."""

    def __init__(
        self,
        recording: Recording,
        lineages: Sequence[Lineage],
        lineage: Lineage,
        stories: Mapping[str, Told],
        checkpoints: Path,
    ) -> None:
        self._recording = recording
        self._lineage = lineage
        self._stories = stories
        self._checkpoints = checkpoints
        self._surviving = compute_surviving_steps([each.started for each in lineages if each.sequence <= lineage.sequence])
        self._settled = settled_before(lineages, lineage)
        self._stored = self._newest()

    def _newest(self) -> CheckpointStored | None:
        """The checkpoint that it began from."""
        stored = [
            message
            for entry in self._before("train", self._lineage.sequence)
            if isinstance(message := _decoded(entry), CheckpointStored) and self._is_begun_from(message)
        ]
        return stored[-1] if stored else None

    def _is_begun_from(self, stored: CheckpointStored) -> bool:
        return stored.step == self._lineage.start and is_surviving(self._surviving, stored.lineage, stored.step)

    @property
    def missing(self) -> str:
        """Why the lineage cannot be begun again, empty if it can."""
        if self._lineage.start and (self._stored is None or read_checkpoint(self._folder(self._stored)) is None):
            return f"there is no checkpoint of step {self._lineage.start}"
        return ""

    def lay(self, stage: Stage) -> list[Told]:
        """Put all of it into the stage's log, and return the open episodes."""
        if self._stored is not None:
            self._rewrite(self._stored)
        open_episodes = []
        for entry in self._before("task", self._lineage.fence):
            told = self._stories.get(entry.subject.rpartition(".")[2])
            if told is not None and self._is_inherited(told.request, entry):
                stage.feed_as_recorded(entry)
                if told.request.episode_id not in self._settled:
                    open_episodes.append(told)
        for entry in self._before("train", self._lineage.sequence):
            message = _decoded(entry)
            if isinstance(message, CheckpointStored):
                file = str(self._folder(message) if self._is_begun_from(message) else self._checkpoints / "not-begun-from")
                stage.feed(entry.subject, msgspec.structs.replace(message, file=file, floor=WHOLE_LOG), entry)
            else:
                stage.feed_as_recorded(entry)
        for entry in self._before("policy", self._lineage.fence):
            stage.feed_as_recorded(entry)
        return open_episodes

    def _is_inherited(self, request: EpisodeRequested, entry: StreamEntry) -> bool:
        return request.split == "train" and bool(request.lineage) and entry.sequence >= self._lineage.started.floor

    def _folder(self, stored: CheckpointStored) -> Path:
        return self._checkpoints / f"{stored.lineage}-{stored.step:06d}"

    def _rewrite(self, stored: CheckpointStored) -> None:
        folder = self._folder(stored)
        made = read_checkpoint(folder)
        assert made is not None
        asked = [
            parse_group_number(told.request.group_id) + 1
            for entry in self._before("task", self._sequence_of(stored))
            if (told := self._stories.get(entry.subject.rpartition(".")[2])) is not None
            if told.request.split == "train" and told.request.lineage
        ]
        checkpoint = Checkpoint(
            lineage=stored.lineage,
            step=stored.step,
            version=stored.version,
            floor=WHOLE_LOG,
            settled=tuple(sorted(self._settled)),
            next_group=max(asked, default=0),
            sha256=made.sha256,
        )
        (folder / INDEX).write_bytes(msgspec.json.encode(checkpoint))

    def _sequence_of(self, stored: CheckpointStored) -> int:
        """Where its step stands in the recording."""
        for entry in self._before("train", self._lineage.sequence):
            message = _decoded(entry)
            if getattr(message, "lineage", "") == stored.lineage and getattr(message, "step", -1) == stored.step:
                return entry.sequence
        return self._lineage.sequence

    def _before(self, kind: str, sequence: int) -> Iterator[StreamEntry]:
        """Recorded entries of one kind before a position."""
        for entry in self._recording.entries:
            if entry.sequence >= sequence:
                return
            if entry.subject.split(".", 3)[2] == kind:
                yield entry


def _decoded(entry: StreamEntry) -> object:
    try:
        return decode_any(COMPARED, entry.payload, subject=entry.subject)
    except MalformedMessage:
        return None
