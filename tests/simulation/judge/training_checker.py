"""Books of the training, kept from the log alone: which lineage survives, what it trained, what it left out, how stale it was.

The invariants of rule 8 of docs/concepts/delivery.md and of the staleness bound; each entry is checked when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.capacity import lag
from fleetbus.core.training.floor import find_group_number
from fleetbus_schemas import (
    GRADED,
    CheckpointStored,
    EpisodeFinished,
    EvaluationFinished,
    Exclusion,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from fleetbus_workers.learner.checkpoints import read_checkpoint
from tests.simulation.judge.episode_checker import EpisodeChecker, EpisodeRecord
from tests.simulation.observer import Observer
from tests.simulation.platform.storage_faults import find_taken_away
from tests.simulation.scenario.shape import POLICY


class SettledEpisode(msgspec.Struct, frozen=True):
    """An episode that a lineage trained or excluded at a step."""

    episode_id: str
    step: int
    trained: bool


class TrainingChecker:
    """The surviving lineage of one policy as of now: ``settled`` by episode id, in order, ``steps`` so far; ``strays`` were
    requested by a learner that had been replaced; ``replaced`` is when that happened to whom. The policy of a seat has a
    learner that asks for nothing."""

    def __init__(
        self,
        observer: Observer,
        episodes: EpisodeChecker,
        *,
        policy: str,
        is_calm: bool,
        max_staleness: int | None,
        groups: int,
        group_size: int,
        tasks: int,
    ) -> None:
        self._observer = observer
        self._episodes = episodes
        self._policy = policy
        self._asks = policy == POLICY
        self._is_calm = is_calm
        self._max_staleness = max_staleness
        self._groups = groups
        self._group_size = group_size
        self._tasks = tasks
        self._task_of: dict[int, str] = {}
        self._number_of: dict[tuple[int, str], int] = {}
        self._lineages: list[str] = []
        self._checkpoints: dict[int, str] = {}
        self._was_checkpointed = False
        self._published: dict[int, PolicyPublished] = {}
        self._lost: dict[int, PolicyPublished] = {}
        self._step_of: dict[int, int] = {}
        self._last_step_at = 0
        self._publisher = ""
        self.lineage: LineageStarted | None = None
        self.settled: dict[str, SettledEpisode] = {}
        self._at_end: set[str] = set()
        """Excluded at the end of training: a lineage that continues from there takes that back."""
        self._ever_settled: set[str] = set()
        """In whichever lineage."""
        self._passed: set[str] = set()
        """What the floor has passed."""
        self.steps = 0
        self.finished = False
        self.strays: set[str] = set()
        self.replaced: dict[str, float] = {}
        self.hidden: set[str] = set()
        """Checkpoints written while their disk was away, which has come back over them, maybe before they were announced."""

    @property
    def trained(self) -> list[str]:
        """Ids that the surviving lineage trained, in order."""
        return [each.episode_id for each in self.settled.values() if each.trained]

    @property
    def newest_version(self) -> int:
        return max([*self._step_of, *self._lost], default=-1)

    def remember(self, before: TrainingChecker) -> None:
        """These books begin anew for a log that lost entries: versions are not given again, and nothing starts over."""
        self._lost = {**before._lost, **before._published}
        self._was_checkpointed = before._was_checkpointed or bool(before._checkpoints)
        self.hidden = before.hidden

    def apply_request(self, record: EpisodeRecord) -> None:
        """A request in flight at a replaced learner counts only if its successor requests it, too."""
        if not self._asks:
            return
        if not self._is_current(record.request.lineage):
            self.strays.add(record.request.episode_id)
        number = find_group_number(record.request)
        if number is not None:
            self._check_task(number, record.request.task.key)

    def _check_task(self, number: int, task: str) -> None:
        """Tasks go on from where an earlier learner stopped: of each epoch a group has one, whoever asks for it."""
        same = self._task_of.setdefault(number, task) == task
        self._observer.require(same, "a group plays one task", f"group {number}: {task}, {self._task_of[number]} before")
        earlier = self._number_of.setdefault((number // self._tasks, task), number)
        self._observer.require(earlier == number, "every task comes once per epoch", f"{task}: groups {earlier} and {number}")

    def is_abandoned(self, record: EpisodeRecord) -> bool:
        """A held-out episode of a learner that was replaced: its successor asks for its own."""
        return bool(record.request.lineage) and record.request.split == "eval" and not self._is_current(record.request.lineage)

    def apply_publication(self, entry: StreamEntry) -> None:
        """An entry of ``policy.<name>``."""
        policy = decode_any(STORED["policy"], entry.payload, subject=entry.subject)
        if isinstance(policy, LineageStarted):
            known, later = policy.lineage in self._lineages, self._order(policy.lineage) > self._order(self._publisher)
            self._observer.require(
                known and later, "no learner takes over from a later one", f"{policy.lineage}, {self._publisher}"
            )
            self._publisher = policy.lineage
            return
        assert isinstance(policy, PolicyPublished)
        require, name = self._observer.require, f"version {policy.version} of {policy.lineage}"
        is_stored_again = self._lost.get(policy.version) == policy and policy.version not in self._step_of
        require(policy.version > self.newest_version or is_stored_again, "version numbers never repeat", name)
        require(policy.lineage == self._publisher, "a replaced learner publishes nothing", name)
        if self._is_current(policy.lineage):
            right = policy.step == self.steps
            require(right, "a version says which step made it", f"{name}: {policy.step}, {self.steps} trained")
        self._step_of[policy.version] = policy.step
        self._published[policy.version] = policy

    def find_readable_step(self, folder: Path) -> int | None:
        """The newest step that counts whose checkpoint lies in ``folder`` and is whole."""
        found = [read_checkpoint(path) for path in folder.glob("l*-*")] if folder.is_dir() else []
        return max(
            (each.step for each in found if each is not None and self._checkpoints.get(each.step) == each.lineage), default=None
        )

    def _order(self, lineage: str) -> int:
        """Lineages begin on ``train.<name>``, one after the other; that a later one has begun there while an earlier one's
        entry is on its way to ``policy.<name>`` is not a fault, and the later one's own entry follows it."""
        return self._lineages.index(lineage) if lineage in self._lineages else -1

    def on_train(self, entry: StreamEntry) -> None:
        """An entry of ``train.<name>``."""
        message = decode_any(STORED["train"], entry.payload, subject=entry.subject)
        if isinstance(message, LineageStarted):
            self._apply_lineage(message)
            return
        assert isinstance(message, (StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished))
        if not self._is_current(message.lineage):
            self._observer.violate("a replaced learner writes nothing", f"{type(message).__name__} of {message.lineage}")
        elif isinstance(message, StepTrained):
            self._apply_step(message, entry.sequence)
        elif isinstance(message, CheckpointStored):
            self._apply_checkpoint(message)
        elif isinstance(message, TrainingFinished):
            self._apply_finish(message)

    def _is_current(self, lineage: str) -> bool:
        return self.lineage is not None and self.lineage.lineage == lineage

    @property
    def _newest(self) -> str:
        """The lineage that the next one follows; empty if there is none.

        A learner begins on ``train.<name>``, then on ``policy.<name>``. Where the log loses both while the second is not
        answered, the learner stores that one again and ends at the next entry of the first: that lineage stands on
        ``policy.<name>`` alone, and who comes after it takes the name for given (docs/concepts/delivery.md, rule 13).
        """
        return self.lineage.lineage if self.lineage is not None else self._publisher

    def _apply_lineage(self, started: LineageStarted) -> None:
        require, step = self._observer.require, started.parent_step
        require(started.lineage not in self._lineages, "a lineage begins once", started.lineage)
        require(started.parent == self._newest, "a lineage follows the newest", str(started))
        anew = step == 0 and (not (self._checkpoints or self._was_checkpointed) or bool(started.restart))
        require(anew or step in self._checkpoints, "a lineage begins at a stored checkpoint", str(started))
        self._lineages.append(started.lineage)
        if self.lineage is not None:
            self.replaced.setdefault(self.lineage.worker, anyio.current_time())
        self._was_checkpointed = self._was_checkpointed and bool(step or not started.restart)  # unless an operator began anew
        self.lineage, self.steps = started, step
        self.settled = {name: each for name, each in self.settled.items() if each.step <= step and name not in self._at_end}
        self._at_end.clear()
        self._checkpoints = {each: lineage for each, lineage in self._checkpoints.items() if each <= step}

    def _apply_step(self, trained: StepTrained, sequence: int) -> None:
        self.steps += 1
        self._last_step_at = sequence
        name = f"step {trained.step} of {trained.lineage}"
        self._observer.require(trained.step == self.steps, "steps are numbered without gaps", name)
        self._observer.require(trained.version > self.newest_version, "version numbers never repeat", name)
        groups: dict[str, int] = {}
        for episode in trained.episodes:
            self._settle(episode, trained=True)
            self._check_trained(episode)
            groups[episode.rpartition("-")[0]] = groups.get(episode.rpartition("-")[0], 0) + 1
        self._observer.require(len(groups) == self._groups, "a step trains a whole batch", f"{name}: {len(groups)} groups")
        self._observer.require(min(groups.values(), default=2) >= 2, "a trained group has a baseline", name)
        self._exclude(trained.excluded)

    def _check_trained(self, episode: str) -> None:
        record = self._episodes.record.get(episode)
        result = record.result if record else None
        if result is None or result.outcome not in GRADED:
            self._observer.violate(
                "only graded episodes are trained", f"{episode}: {result.outcome if result else 'no result'}"
            )
            return
        versions = self._list_versions(result)
        self._observer.require(bool(versions), "an episode is trained by the learners of who played it", episode)
        behind = lag(self.steps - 1, tuple(self._step_of.get(version, 0) for version in versions))
        right = self._max_staleness is None or behind <= self._max_staleness
        self._observer.require(right, "staleness is bounded", f"{episode}: {behind} steps")

    def _list_versions(self, result: EpisodeFinished) -> tuple[int, ...]:
        """The versions that sampled the policy's turns of an episode; of another policy's seats by the Actions that the log
        still has: one that lost its newest entries may lack some."""
        record = self._episodes.record[result.episode_id]
        if record.request.policy == self._policy:
            return result.policy_versions
        players, history = {each.seat: each.policy for each in record.request.seats}, record.history(result.attempt)
        seats = [seat for seat in result.seats if players.get(seat.name) == self._policy]
        own = [turn for seat in seats for turn in seat.turns if turn < len(history)]
        return tuple(sorted({span.version for turn in own for span in history[turn].action.versions}))

    def check_floor(self) -> None:
        """The floor was raised: below it is nothing of which a learner that begins now would not know that it is settled."""
        passed = {
            record.request.episode_id
            for record in self._episodes.record.values()
            if self._trains(record) and self._is_passed(record)
        }
        open_below = sorted(passed - self._passed - self.settled.keys())
        self._passed |= passed
        right = not open_below or self.finished
        name = f"{self._policy}: {', '.join(open_below[:4])}"
        self._observer.require(right, "nothing unsettled is passed by the floor", name)

    def check_content(self, is_held: Callable[[int], bool]) -> None:
        """What a learner has yet to train stands in the log."""
        for episode, record in self._episodes.record.items():
            result = record.result
            if result is None or episode in self._ever_settled or self.finished or not self._trains(record):
                continue
            lost = [turn.sequence for turn in record.history(result.attempt)[: result.turns] if not is_held(turn.sequence)]
            self._observer.require(not lost, "nothing leaves the log before it is settled", f"{self._policy}: {episode} {lost}")

    def list_unsettled(self) -> list[EpisodeRecord]:
        """The episodes that its learner has yet to train or to exclude."""
        left = (record for name, record in self._episodes.record.items() if name not in self.settled)
        return [record for record in left if self._trains(record) and not self._is_passed(record)]

    def _is_passed(self, record: EpisodeRecord) -> bool:
        """True if the floor has passed it for this policy: it stays settled, whatever lineage is cut afterwards."""
        number, floor = find_group_number(record.request), self._episodes.floor
        if self._asks or number is None:
            return self._episodes.is_passed(record)
        return record.request_sequence < floor.sequence or number < floor.groups.get(self._policy, 0)

    def _trains(self, record: EpisodeRecord) -> bool:
        """True for what a learner of this policy is to train, or to exclude."""
        request = record.request
        is_stray = request.episode_id in self.strays or record.refused
        return find_group_number(request) is not None and self._policy in request.trained_policies and not is_stray

    def _exclude(self, excluded: tuple[Exclusion, ...]) -> None:
        for exclusion in excluded:
            self._settle(exclusion.episode_id, trained=False)
            record = self._episodes.record.get(exclusion.episode_id)
            result = record.result if record else None
            was_in_time = exclusion.reason != "stale" or self._asks or not self._is_calm
            self._observer.require(was_in_time, "who asks for episodes waits for all learners", str(exclusion))
            if result is None:
                self._observer.violate("what is excluded has a result", exclusion.episode_id)
            elif result.outcome not in GRADED:
                right = exclusion.reason == result.outcome
                self._observer.require(right, "an exclusion tells the outcome", f"{exclusion}: {result.outcome}")

    def _settle(self, episode: str, *, trained: bool) -> None:
        earlier = self.settled.get(episode)
        if earlier is not None:
            self._observer.violate("an episode is settled once in the surviving lineage", f"{episode}: {earlier}")
        self._ever_settled.add(episode)
        self.settled[episode] = SettledEpisode(episode, self.steps, trained)

    def _apply_checkpoint(self, stored: CheckpointStored) -> None:
        self._checkpoints[stored.step] = stored.lineage
        # A learner that died may have its last checkpoint announced once their disk is away.
        file, name = find_taken_away(Path(stored.file)), f"step {stored.step} of {stored.lineage}"
        checkpoint = read_checkpoint(file)
        if checkpoint is None and file.name in self.hidden:
            return
        if checkpoint is None or (checkpoint.lineage, checkpoint.step) != (stored.lineage, stored.step):
            self._observer.violate("a checkpoint is whole when it is announced", name)
            return
        self._observer.require(checkpoint.step == self.steps, "a checkpoint holds the last step", name)
        requests = [
            record
            for record in self._episodes.record.values()
            if record.request.split == "train" and not self._is_passed(record)
        ]
        skipped = [
            record.request.episode_id
            for record in requests
            if record.request_sequence < checkpoint.floor and record.request.episode_id not in self.settled
        ]
        above = {record.request.episode_id for record in requests if record.request_sequence >= checkpoint.floor}
        open_settled = {name for name in checkpoint.settled if not self._is_passed(self._episodes.record[name])}
        differing = (above & set(self.settled)) ^ open_settled
        self._observer.require(not skipped, "nothing unsettled lies below the floor", f"{name}: {skipped[:4]}")
        self._observer.require(not differing, "a checkpoint says what is settled", f"{name}: {sorted(differing)[:4]}")

    def _apply_finish(self, finished: TrainingFinished) -> None:
        self._exclude(finished.excluded)
        self._at_end |= {each.episode_id for each in finished.excluded}
        self.finished = not finished.more
        if finished.more:
            return

    def check_settled(self) -> None:
        """At the end of the world: of finished training nothing is left over that had its result in time."""
        for group, members in self._group_requests().items():
            if len(members) == self._group_size and all(self._had_result(episode) for episode in members):
                skipped = [episode for episode in members if episode not in self.settled]
                self._observer.require(not skipped, "requested = trained + excluded + in flight", f"{group}: {skipped}")

    def _group_requests(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for record in self._episodes.record.values():
            stray = record.request.episode_id in self.strays or self._is_passed(record)
            if record.request.split == "train" and not stray:
                groups.setdefault(record.request.group_id, []).append(record.request.episode_id)
        return groups

    def _had_result(self, episode: str) -> bool:
        """True if the result was there before the last step, when the learner looked for the last time."""
        record = self._episodes.record[episode]
        return record.result is not None and record.result_sequence < self._last_step_at
