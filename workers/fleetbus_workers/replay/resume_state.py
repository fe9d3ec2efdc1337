"""The state that a resumed learner finds: what learners before it published, open requests, and its checkpoint.

Of the checkpoint only what trainers wrote is made by the replay of the lineages before, in the replay's own folder; the rest
follows from the recording, whose order of requests a replay does not repeat.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.config.seats import list_joined_policies
from fleetbus.core.training.floor import parse_group_number
from fleetbus.core.training.joined_policies import JoinedPolicies
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.episodes import read_entry
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording import Recording
from fleetbus_schemas import CheckpointStored, EpisodeRequested, Message, Subjects, TrainingFinished
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.names import is_name
from fleetbus_schemas.subjects import check_name
from fleetbus_workers.learner.checkpoints import INDEX, Checkpoint, read_checkpoint
from fleetbus_workers.replay.recorded_episode import RecordedEpisode
from fleetbus_workers.replay.recorded_lineages import Lineage, find_settled, is_of_another
from fleetbus_workers.replay.replay_environment import ReplayEnvironment

WHOLE_LOG = 1
"""Only what stands above the recorded floor is stored, so the floor of the replay's log is its beginning."""


class ResumeState:
    """The state that ``lineage`` found when it began; ``checkpoints`` is the replay's own folder of them, from which those go
    that nobody recorded: a kill had prevented them. ``joined``: the policy of a learner that asks for nothing, empty for the
    one that asks."""

    def __init__(
        self,
        recording: Recording,
        lineages: Sequence[Lineage],
        lineage: Lineage,
        episodes: Mapping[str, RecordedEpisode],
        checkpoints: Path,
        joined: str = "",
    ) -> None:
        self._recording = recording
        self._lineage = lineage
        self._episodes = episodes
        self._checkpoints = checkpoints
        self._joined = joined
        self._others = JoinedPolicies()
        self._surviving = compute_surviving_steps([each.started for each in lineages if each.sequence <= lineage.sequence])
        self._settled = find_settled(lineages, lineage)
        stored = [each for _, each in self._find_trained_before() if isinstance(each, CheckpointStored) and self._is_own(each)]
        self._stored = stored[-1] if stored else None

    def _is_own(self, stored: CheckpointStored) -> bool:
        """True for a checkpoint that the lineage could begin from."""
        return stored.step == self._lineage.start and is_surviving(self._surviving, stored.lineage, stored.step)

    @property
    def missing(self) -> str:
        """The reason why the lineage cannot be started again, empty if it can."""
        if self._lineage.start and (self._stored is None or read_checkpoint(self._folder(self._stored)) is None):
            return f"there is no checkpoint of step {self._lineage.start}"
        return ""

    def restore(self, environment: ReplayEnvironment) -> list[RecordedEpisode]:
        """Store all of it in the log, and return the open episodes. The learners of seats, which are not there, have finished:
        nobody waits for them."""
        others = () if self._joined else list_joined_policies(environment.configuration.run)
        for policy in others:
            finished = TrainingFinished(lineage=self._lineage.name, step=0, version=0)
            environment.store(Subjects(environment.configuration.run.name).train(policy), finished, self._recording.entries[0])
        self._remove_unrecorded()
        if self._stored is not None:
            self._write_checkpoint(self._stored)
        open_episodes = []
        for entry, episode in self._find_requested_before(self._lineage.fence):
            if entry.sequence >= self._lineage.started.floor:
                environment.store_as_recorded(entry)
                if episode.episode_id not in self._settled:
                    open_episodes.append(episode)
        for entry, message in self._find_trained_before():
            if isinstance(message, CheckpointStored):
                file = self._folder(message) if self._is_own(message) else self._checkpoints / "of-no-use"
                message = msgspec.structs.replace(message, file=str(file), floor=WHOLE_LOG, sha256="")  # its index is another
                environment.store(entry.subject, message, entry)
            else:
                environment.store_as_recorded(entry)
        for entry in self._before("policy", self._lineage.fence):
            environment.store_as_recorded(entry)
        return open_episodes

    def _remove_unrecorded(self) -> None:
        trained = (read_entry(STORED["train"], entry) for entry in self._before("train", sys.maxsize))
        named = {self._folder(each) for each in trained if isinstance(each, CheckpointStored) and is_name(each.lineage)}
        for folder in set(self._checkpoints.iterdir()) - named:
            shutil.rmtree(folder)

    def _folder(self, stored: CheckpointStored) -> Path:
        return self._checkpoints / f"{check_name('lineage', stored.lineage)}-{stored.step:06d}"

    def _write_checkpoint(self, stored: CheckpointStored) -> None:
        folder = self._folder(stored)
        made = read_checkpoint(folder)
        assert made is not None
        trained_at = next(
            entry.sequence
            for entry, message in self._find_trained_before()
            if getattr(message, "lineage", "") == stored.lineage and getattr(message, "step", -1) == stored.step
        )
        requested = [episode.request for _, episode in self._find_requested_before(trained_at)]
        checkpoint = Checkpoint(
            lineage=stored.lineage,
            step=stored.step,
            version=stored.version,
            floor=WHOLE_LOG,
            settled=tuple(sorted(self._settled)),
            next_group=max((parse_group_number(each.group_id) + 1 for each in requested if each is not None), default=0),
            meetings=made.meetings,
            sha256=made.sha256,
        )
        (folder / INDEX).write_bytes(msgspec.json.encode(checkpoint))

    def _find_requested_before(self, sequence: int) -> Iterator[tuple[StreamEntry, RecordedEpisode]]:
        """Learners' training requests before a position."""
        for entry in self._before("task", sequence):
            episode = self._episodes.get(entry.subject.rpartition(".")[2])
            request: EpisodeRequested | None = episode.request if episode is not None else None
            if episode is not None and request is not None and request.split == "train" and request.lineage:
                yield entry, episode

    def _find_trained_before(self) -> Iterator[tuple[StreamEntry, Message | None]]:
        """Messages that learners before this one published on ``train``."""
        for entry in self._before("train", self._lineage.sequence):
            yield entry, read_entry(STORED["train"], entry)

    def _before(self, kind: str, sequence: int) -> Iterator[StreamEntry]:
        for entry in self._recording.entries:
            if entry.sequence >= sequence:
                return
            if entry.subject.split(".", 3)[2] != kind:
                continue
            if kind == "task" or not is_of_another(entry.subject, read_stored(entry), self._others, self._joined):
                yield entry
