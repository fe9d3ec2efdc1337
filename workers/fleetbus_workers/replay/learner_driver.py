"""Replay of the learner role: recorded results to the same requests, batches, metrics and, on a CPU, the same weights.

A result is stored when the replayed learner has asked for its episode, and in the step that consumed it in the recording: then
the groups that are complete are those that were complete when the recorded batch was taken. Each lineage of a run whose learner
was replaced or started again is replayed in turn, on its `ResumeState`. Without a trainer `RecordedTrainer` stands in for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.concurrency.notifier import Notifier
from fleetbus.concurrency.runtime import run_in_thread
from fleetbus.config.seats import find_joined_policy
from fleetbus_schemas import CheckpointStored, EpisodeRequested, Message, PolicyPublished, StepTrained, Task, TrainingFinished
from fleetbus_schemas.channels import STORED
from fleetbus_workers.learner.training_digest import train_with_digests
from fleetbus_workers.replay.compare import Found
from fleetbus_workers.replay.driver import Compared, Driver, ReplayContext
from fleetbus_workers.replay.recorded_episode import RecordedEpisode
from fleetbus_workers.replay.recorded_lineages import (
    KINDS,
    Key,
    Lineage,
    find_optional,
    is_requested_by_learner,
    key_of,
    map_to_steps,
)
from fleetbus_workers.replay.recorded_trainer import RecordedTrainer
from fleetbus_workers.replay.replay_environment import ReplayEnvironment, translate_positions
from fleetbus_workers.weights.manifests import inline_manifest

ADMISSION_SECONDS = 5.0
"""Longest wait for requests: of training for those that were recorded before it ended, and for those that may not come."""


class RecordedTasks:
    """The curriculum that the recorded requests show."""

    def __init__(self, episodes: Iterable[RecordedEpisode]) -> None:
        self._by_group: dict[str, Task] = {}
        evaluated: defaultdict[str, dict[int, Task]] = defaultdict(dict)
        for request in (episode.request for episode in episodes):
            if request is None or not is_requested_by_learner(request):
                continue
            if request.split == "train":
                self._by_group.setdefault(request.group_id, request.task)
            else:
                evaluated[request.group_id][request.sample_index] = request.task
        fullest = max(evaluated.values(), key=len, default={})
        self.held_out = [fullest[number] for number in sorted(fullest)]

    def task(self, number: int) -> Task:
        """The recorded task of that group; any task for groups that were not recorded."""
        return self._by_group.get(f"g{number:06d}") or Task(key="beyond-the-recording")

    def evaluation(self, count: int) -> list[Task]:
        return self.held_out[:count]


class LearnerDriver(Driver):
    """Stores results for the learner of one lineage until all that it published was compared or something differs.

    ``open_episodes`` were requested by learners before, and are this one's now.
    """

    kinds: ClassVar[tuple[str, ...]] = KINDS
    types = tuple({kind for name in KINDS for kind in STORED[name]})

    def __init__(
        self,
        context: ReplayContext,
        environment: ReplayEnvironment,
        lineage: Lineage,
        episodes: dict[str, RecordedEpisode],
        open_episodes: list[RecordedEpisode],
    ) -> None:
        super().__init__(context, environment, start=environment.next_sequence)
        self.lineage = lineage
        self._last_step, self._is_whole = lineage.last_step, lineage.is_whole
        self._episodes = episodes
        self._expected = dict(lineage.published)
        self._stop_checkpoint = self._remove_unscheduled()
        self._optional = find_optional(lineage)
        steps = lineage.steps
        self._step = lineage.start + 1
        self._consumed_in = defaultdict(lambda: self._last_step + 1, map_to_steps(steps))
        self._trained_in = {name: step.step for step in steps for name in step.episodes}
        self._training = lineage.start
        self._trained_at = {message.step: entry.sequence for entry, message in self._find(StepTrained)}
        self._ready: defaultdict[int, list[RecordedEpisode]] = defaultdict(list)
        """By step its episodes that were requested; their results are stored in that step."""
        self._schedule(open_episodes)
        self._requests = deque(key for key, (_, message) in self._expected.items() if isinstance(message, EpisodeRequested))
        self._unrequested: defaultdict[int, set[str]] = defaultdict(set)
        for _, request in self._find(EpisodeRequested):
            self._unrequested[self._consumed_in[request.episode_id]].add(request.episode_id)
        self._requested = Notifier()
        self._offloaded = 0
        self.train_seconds = 0.0

    def _schedule(self, open_episodes: list[RecordedEpisode]) -> None:
        """Make ready what the learner does not ask for."""
        for episode in open_episodes:
            self._ready[self._consumed_in[episode.episode_id]].append(episode)

    def _find(self, kind: type[object]) -> Iterable[tuple[StreamEntry, Any]]:
        return ((entry, message) for entry, message in self._expected.values() if isinstance(message, kind))

    def _remove_unscheduled(self) -> Key | None:
        """Expect no checkpoint that was not due, except that of the last step, which is returned: it was stored because the
        learner had to stop. Others were stored because the log was full."""
        settings, last = self.environment.configuration.learner, self._last_step
        due = {settings.steps, *range(0, last + 1, settings.checkpoint_every)}
        unscheduled = {message.step for _, message in self._find(CheckpointStored)} - due
        for step in unscheduled - {last}:
            del self._expected["CheckpointStored", f"step {step}"]
            self.report.skipped["checkpoints that were stored because the log was full"] += 1
        return ("CheckpointStored", f"step {last}") if last in unscheduled else None

    async def offload(self, function: Callable[..., object], *arguments: object, **options: Any) -> Any:
        """Blocking work of the learner. It trains only when it has made the requests that were recorded before that step ended;
        with the last batch taken, all other results are stored."""
        is_training = function is train_with_digests
        if is_training:
            self._training += 1
            await self._wait_for_requests(self._trained_at.get(self._training, 0))
            if self._step >= self._last_step and self._is_whole:
                await self._store_results(self._last_step + 1)
        began = anyio.current_time()
        self._offloaded += 1
        try:
            return await run_in_thread(function, *arguments, **options)
        finally:
            self._offloaded -= 1
            self.train_seconds += (anyio.current_time() - began) * is_training

    async def _wait_for_requests(self, sequence: int) -> None:
        """Wait for the requests that were recorded before this position, if they come soon."""
        with anyio.move_on_after(ADMISSION_SECONDS):
            while self._requests:
                recorded = self._expected.get(self._requests[0])
                if recorded is None:  # it was published
                    self._requests.popleft()
                elif recorded[0].sequence < sequence:
                    await self._requested.wait()
                else:
                    return

    async def drive(self) -> None:
        await self._store_results(self._step)
        while self._expected and not self.report.differences:
            required = len(self._expected) - len(self._optional)
            only_stop = required == 1 and self._stop_checkpoint in self._expected and not self.drain.is_set()
            if only_stop:
                patience = ADMISSION_SECONDS if self._optional else 0.0
            else:
                patience = self.options.patience_seconds if required else ADMISSION_SECONDS
            received = await self.receive(patience)
            if received is not None:
                await self._check(*received)
            elif only_stop:
                self.drain.set()
            elif not required:
                break
            elif not self._offloaded:  # a step of a large model takes its time
                key, (entry, message) = min(self._expected.items(), key=lambda each: each[1][0].sequence)
                self._note_difference(key, entry.sequence, Found("type", type(message).__name__, self.silence))
                return
        if self._optional and not self.report.differences:
            reason = f"requests of lineage {self.lineage.name} in a step whose end was not recorded"
            self.report.skipped[reason] += len(self._optional)

    async def _check(self, entry: StreamEntry, message: Message) -> None:
        key = key_of(entry.subject, message)
        if key not in self._expected:
            if self._is_whole:
                self._note_difference(key, 0, Found("type", "(nothing)", type(message).__name__))
            else:
                self.report.skipped[f"messages beyond the recorded end of lineage {self.lineage.name}"] += 1
            return
        recorded_entry, recorded = self._expected.pop(key)
        self._optional.discard(key)
        self.context.progress.advance()
        self.environment.map_position(recorded_entry.sequence, entry.sequence)
        compared = self._describe_compared(key, recorded_entry.sequence)
        same = self.compare(sort_exclusions(recorded), sort_exclusions(message), compared, entry.subject)
        if same and isinstance(message, EpisodeRequested):
            await self._take_request(message)
        elif same and isinstance(message, StepTrained):
            self._step = message.step + 1
            await self._store_results(self._step)

    async def _take_request(self, request: EpisodeRequested) -> None:
        """Its result is stored at once if it is an evaluation, else with the others of its step."""
        episode = self._episodes[request.episode_id]
        self._requested.notify()
        if request.split == "eval":
            await self._store_result(episode)
            return
        step = self._consumed_in[episode.episode_id]
        self._unrequested[step].discard(episode.episode_id)
        self._ready[step].append(episode)
        if step <= self._step and not (self._unrequested[step] and self._trains(step, episode)):
            await self._store_results(step)

    def _trains(self, step: int, episode: RecordedEpisode) -> bool:
        return self._trained_in.get(episode.episode_id) == step

    async def _store_results(self, step: int) -> None:
        """Store the results of a step; none of a step whose end was not recorded, as it is unknown what it took.

        Episodes that the step excluded come first: a batch is taken as soon as its last group is complete, so those that it
        trained wait until all that it consumed is requested.
        """
        if step > self._last_step and not self._is_whole:
            return
        ready = sorted(self._ready.pop(step, []), key=lambda each: each.result_entry.sequence if each.result_entry else 0)
        ready.sort(key=lambda each: self._trains(step, each))
        for number, episode in enumerate(ready):
            if self._trains(step, episode) and self._unrequested[step]:
                self._ready[step] = ready[number:]
                return
            await self._store_result(episode)

    async def _store_result(self, episode: RecordedEpisode) -> None:
        """Store the Actions that the result refers to, then the result with the positions that they have here."""
        result, entry = episode.result, episode.result_entry
        if result is None or entry is None:
            return
        await self.context.wait_until_due(entry)
        if result.split == "train":
            for action in episode.result_actions:
                self.environment.store_as_recorded(action)
        self.environment.store(entry.subject, translate_positions(result, self.environment.new_positions), entry)

    def make_recorded_trainer(self) -> RecordedTrainer:
        """The stand-in for training."""

        def note(step: int, episode_id: str, found: Found) -> None:
            episode = self._episodes.get(episode_id)
            entry = episode.result_entry if episode is not None else None
            self._note_difference(("batch of step", str(step), "episode", episode_id), entry.sequence if entry else 0, found)

        objects, configuration = self.environment.objects, self.environment.configuration
        return RecordedTrainer(
            self.lineage.start,
            {message.step: message for _, message in self._find(StepTrained)},
            {message.version: inline_manifest(message, objects) for _, message in self._find(PolicyPublished)},
            episodes=self._episodes,
            on_difference=note,
            truncation_mask=configuration.algorithm.truncation_mask,
            policy=find_joined_policy(configuration),
        )

    def _note_difference(self, key: Key, sequence: int, found: Found) -> None:
        self.note_difference(found, self._describe_compared(key, sequence))

    def _describe_compared(self, key: Key, sequence: int) -> Compared:
        return Compared(" ".join(key), sequence, describe=self._describe)

    def _describe(self) -> tuple[str, ...]:
        steps = f"after {self.report.compared['StepTrained']} steps that were compared"
        lineage = f"lineage {self.lineage.name}, from step {self.lineage.start} on"
        return (steps, lineage) if self.lineage.started.parent else (steps,)


def sort_exclusions(message: Message) -> Message:
    """The order in which a step excluded episodes depends on when the learner looked: compare them by id."""
    if isinstance(message, StepTrained | TrainingFinished):
        return msgspec.structs.replace(message, excluded=tuple(sorted(message.excluded, key=lambda each: each.episode_id)))
    return message
