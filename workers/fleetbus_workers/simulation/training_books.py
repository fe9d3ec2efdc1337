"""Books of the training, kept from the log alone: which lineage survives, what it trained, what it left out, how stale it was.

The invariants of delivery rule 8 and of the staleness bound; each entry is checked when it is stored.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec

from fleetbus.bus.base import Stored
from fleetbus.core.capacity import lag
from fleetbus_schemas import (
    GRADED,
    CheckpointStored,
    EvaluationFinished,
    Exclusion,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.stored import STORED
from fleetbus_workers.learner.checkpoints import read_checkpoint
from fleetbus_workers.simulation.episode_books import EpisodeBooks, EpisodePages
from fleetbus_workers.simulation.watch import Watch


class SettledEpisode(msgspec.Struct, frozen=True):
    """An episode that a lineage trained or excluded at a step."""

    episode_id: str
    step: int
    trained: bool


class TrainingBooks:
    """The surviving lineage as of now: ``settled`` by episode id, in order, ``steps`` so far; ``strays`` were requested by a
    learner that had been replaced; ``replaced`` is when that happened to whom."""

    def __init__(self, watch: Watch, episodes: EpisodeBooks, *, max_staleness: int, groups: int, group_size: int) -> None:
        self._watch = watch
        self._episodes = episodes
        self._max_staleness = max_staleness
        self._groups = groups
        self._group_size = group_size
        self._lineages: set[str] = set()
        self._checkpoints: set[int] = set()
        self._step_of: dict[int, int] = {}
        self._last_step_at = 0
        self._publisher = ""
        self.lineage: LineageStarted | None = None
        self.settled: dict[str, SettledEpisode] = {}
        self.steps = 0
        self.finished = False
        self.strays: set[str] = set()
        self.replaced: dict[str, float] = {}

    @property
    def trained(self) -> list[str]:
        """Ids that the surviving lineage trained, in order."""
        return [each.episode_id for each in self.settled.values() if each.trained]

    @property
    def newest_version(self) -> int:
        return max(self._step_of, default=-1)

    def requested(self, pages: EpisodePages) -> None:
        """A request that a replaced learner had under way is in nobody's books unless its successor asks for it, too."""
        if not self._is_current(pages.request.lineage):
            self.strays.add(pages.request.episode_id)

    def published(self, entry: Stored) -> None:
        """An entry of ``policy.<name>``."""
        policy = decode_any(STORED["policy"], entry.payload, subject=entry.subject)
        if isinstance(policy, LineageStarted):
            self._watch.require(self._is_current(policy.lineage), "only the newest learner takes over", policy.lineage)
            self._publisher = policy.lineage
            return
        assert isinstance(policy, PolicyPublished)
        require, name = self._watch.require, f"version {policy.version} of {policy.lineage}"
        require(policy.version > self.newest_version, "version numbers never repeat", name)
        require(policy.lineage == self._publisher, "a replaced learner publishes nothing", name)
        if self._is_current(policy.lineage):
            right = policy.step == self.steps
            require(right, "a version says which step made it", f"{name}: {policy.step}, {self.steps} trained")
        self._step_of[policy.version] = policy.step

    def on_train(self, entry: Stored) -> None:
        """An entry of ``train.<name>``."""
        message = decode_any(STORED["train"], entry.payload, subject=entry.subject)
        if isinstance(message, LineageStarted):
            self._started(message)
            return
        assert isinstance(message, (StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished))
        if not self._is_current(message.lineage):
            self._watch.violate("a replaced learner writes nothing", f"{type(message).__name__} of {message.lineage}")
        elif isinstance(message, StepTrained):
            self._stepped(message, entry.sequence)
        elif isinstance(message, CheckpointStored):
            self._checkpointed(message)
        elif isinstance(message, TrainingFinished):
            self._finish(message)

    def _is_current(self, lineage: str) -> bool:
        return self.lineage is not None and self.lineage.lineage == lineage

    def _started(self, started: LineageStarted) -> None:
        require, step = self._watch.require, started.parent_step
        require(started.lineage not in self._lineages, "a lineage begins once", started.lineage)
        require(started.parent == (self.lineage.lineage if self.lineage else ""), "a lineage follows the newest", str(started))
        require(step == 0 or step in self._checkpoints, "a lineage begins at a stored checkpoint", str(started))
        self._lineages.add(started.lineage)
        if self.lineage is not None:
            self.replaced.setdefault(self.lineage.worker, anyio.current_time())
        self.lineage, self.steps = started, step
        self.settled = {name: each for name, each in self.settled.items() if each.step <= step}
        self._checkpoints = {each for each in self._checkpoints if each <= step}

    def _stepped(self, trained: StepTrained, sequence: int) -> None:
        self.steps += 1
        self._last_step_at = sequence
        name = f"step {trained.step} of {trained.lineage}"
        self._watch.require(trained.step == self.steps, "steps are numbered without gaps", name)
        self._watch.require(trained.version > self.newest_version, "version numbers never repeat", name)
        groups: dict[str, int] = {}
        for episode in trained.episodes:
            self._settle(episode, trained=True)
            self._check_trained(episode)
            groups[episode.rpartition("-")[0]] = groups.get(episode.rpartition("-")[0], 0) + 1
        self._watch.require(len(groups) == self._groups, "a step trains a whole batch", f"{name}: {len(groups)} groups")
        self._watch.require(min(groups.values(), default=2) >= 2, "a trained group has a baseline", name)
        self._exclude(trained.excluded)

    def _check_trained(self, episode: str) -> None:
        pages = self._episodes.pages.get(episode)
        result = pages.result if pages else None
        if result is None or result.outcome not in GRADED:
            self._watch.violate("only graded episodes are trained", f"{episode}: {result.outcome if result else 'no result'}")
            return
        behind = lag(self.steps - 1, tuple(self._step_of.get(version, 0) for version in result.policy_versions))
        self._watch.require(behind <= self._max_staleness, "staleness is bounded", f"{episode}: {behind} steps")

    def _exclude(self, excluded: tuple[Exclusion, ...]) -> None:
        for exclusion in excluded:
            self._settle(exclusion.episode_id, trained=False)
            pages = self._episodes.pages.get(exclusion.episode_id)
            result = pages.result if pages else None
            if result is None:
                self._watch.violate("what is excluded has a result", exclusion.episode_id)
            elif result.outcome not in GRADED:
                right = exclusion.reason == result.outcome
                self._watch.require(right, "an exclusion tells the outcome", f"{exclusion}: {result.outcome}")

    def _settle(self, episode: str, *, trained: bool) -> None:
        earlier = self.settled.get(episode)
        if earlier is not None:
            self._watch.violate("an episode is settled once in the surviving lineage", f"{episode}: {earlier}")
        self.settled[episode] = SettledEpisode(episode, self.steps, trained)

    def _checkpointed(self, stored: CheckpointStored) -> None:
        checkpoint, name = read_checkpoint(Path(stored.file)), f"step {stored.step} of {stored.lineage}"
        if checkpoint is None or (checkpoint.lineage, checkpoint.step) != (stored.lineage, stored.step):
            self._watch.violate("a checkpoint is whole when it is announced", name)
            return
        self._watch.require(checkpoint.step == self.steps, "a checkpoint holds the last step", name)
        self._checkpoints.add(stored.step)
        requests = [pages for pages in self._episodes.pages.values() if pages.request.split == "train"]
        skipped = [
            pages.request.episode_id
            for pages in requests
            if pages.request_sequence < checkpoint.floor and pages.request.episode_id not in self.settled
        ]
        above = {pages.request.episode_id for pages in requests if pages.request_sequence >= checkpoint.floor}
        differing = (above & set(self.settled)) ^ set(checkpoint.settled)
        self._watch.require(not skipped, "nothing unsettled lies below the floor", f"{name}: {skipped[:4]}")
        self._watch.require(not differing, "a checkpoint says what is settled", f"{name}: {sorted(differing)[:4]}")

    def _finish(self, finished: TrainingFinished) -> None:
        self._exclude(finished.excluded)
        self.finished = True
        for group, members in self._groups_of_requests().items():
            if len(members) == self._group_size and all(self._had_result(episode) for episode in members):
                skipped = [episode for episode in members if episode not in self.settled]
                self._watch.require(not skipped, "requested = trained + excluded + in flight", f"{group}: {skipped}")

    def _groups_of_requests(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for pages in self._episodes.pages.values():
            if pages.request.split == "train" and pages.request.episode_id not in self.strays:
                groups.setdefault(pages.request.group_id, []).append(pages.request.episode_id)
        return groups

    def _had_result(self, episode: str) -> bool:
        """Whether the result was there before the last step, when the learner looked for the last time."""
        pages = self._episodes.pages[episode]
        return pages.result is not None and pages.result_sequence < self._last_step_at
