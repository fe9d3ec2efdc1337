"""Feeds a replayed learner its recorded results, step by step, and compares what it publishes with what was recorded.

A result is fed when the replayed learner has asked for its episode, and in the step that consumed it in the recording: then the
groups that are complete are those that were complete when the recorded batch was taken.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import LearnerSettings
from fleetbus.episodes import decode_entries
from fleetbus.notifier import Notifier
from fleetbus.runtime import run_in_thread
from fleetbus_schemas import Action, CheckpointStored, EpisodeRequested, Message, PolicyPublished, StepTrained, TrainingFinished
from fleetbus_workers.replay.compare import first_difference
from fleetbus_workers.replay.learner_book import COMPARED, Key, Lineage, consumed_by, key_of
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import Difference, Report
from fleetbus_workers.replay.stage import Pace, Stage
from fleetbus_workers.replay.told import Told
from fleetbus_workers.replay.untrained import RecordedTrainer, Trained, WrongBatch
from fleetbus_workers.weights.manifests import inline_manifest

ADMISSION_SECONDS = 5.0
"""Longest wait for requests: of training for those that were recorded before it ended, and for those that may not come."""


class LearnerDirector:
    """Feeds results and compares what the learner of one lineage publishes, until all of it came or something differs.

    ``inherited`` are episodes that learners before asked for, and that are this one's now.
    """

    def __init__(
        self,
        stage: Stage,
        lineage: Lineage,
        stories: dict[str, Told],
        report: Report,
        pace: Pace,
        ignored: frozenset[str],
        patience_seconds: float,
        *,
        inherited: Sequence[Told],
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._lineage = lineage
        self._inherited = inherited
        self._progress = progress
        self._expected = expected = dict(lineage.published)
        self._beyond = _undecided(lineage)
        unscheduled = _unscheduled(lineage, stage.configuration.learner)
        self._goodbye = unscheduled.pop() if unscheduled and unscheduled[-1] == _checkpoint(lineage.last_step) else None
        for key in unscheduled:
            del expected[key]
            report.skipped["checkpoints that were stored because the log was full"] += 1
        self.drain = anyio.Event()
        """Set when the learner has to stop, as the recorded one did."""
        self._start = stage.next_sequence
        self._stories = stories
        self._report = report
        self._pace = pace
        self._ignored = ignored
        self._patience_seconds = patience_seconds
        steps = lineage.steps
        self._last_step = lineage.last_step
        self._consumed = consumed_by(steps)
        self._step = lineage.start + 1
        self._ready: defaultdict[int, list[Told]] = defaultdict(list)
        self._trained_in = defaultdict(frozenset[str], {step.step: frozenset(step.episodes) for step in steps})
        self._unasked: defaultdict[int, set[str]] = defaultdict(set)
        for _, message in expected.values():
            if isinstance(message, EpisodeRequested) and message.episode_id in self._consumed:
                self._unasked[self._consumed[message.episode_id]].add(message.episode_id)
        self._steps = {step.step: self._place(step) for step in steps}
        self._due = deque(key for key, (_, message) in expected.items() if isinstance(message, EpisodeRequested))
        self._training = lineage.start
        self._computing = 0
        self.seconds: dict[str, float] = {}
        """What blocking work took, by the name of its function."""
        self._asked = Notifier()

    def _place(self, message: StepTrained) -> int:
        return self._expected[key_of("", message)][0].sequence

    async def offload(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Blocking work of the learner. It trains no faster than it asked for episodes meanwhile, in the recording; with the
        last batch taken, whatever else was recorded may come in."""
        name = getattr(function, "__name__", "")
        if name == "train":
            self._training += 1
            await self._asked_before(self._steps.get(self._training, 0))
            if self._step >= self._last_step and self._lineage.is_whole:
                await self._feed_all(self._last_step + 1)
        began = anyio.current_time()
        self._computing += 1
        try:
            return await run_in_thread(function, *arguments, **options)
        finally:
            self._computing -= 1
            self.seconds[name] = self.seconds.get(name, 0.0) + anyio.current_time() - began

    async def _asked_before(self, sequence: int) -> None:
        """Until all that was asked for before this entry of the recording is asked for, if it comes soon."""
        with anyio.move_on_after(ADMISSION_SECONDS):
            while self._due:
                recorded = self._expected.get(self._due[0])
                if recorded is None:  # it came
                    self._due.popleft()
                elif recorded[0].sequence < sequence:
                    await self._asked.wait()
                else:
                    return

    async def direct(self) -> None:
        with self._stage.published("task", "train", "policy", types=COMPARED, start=self._start) as published:
            for story in self._inherited:
                self._ready[self._consumed.get(story.request.episode_id, self._last_step + 1)].append(story)
            await self._feed_all(self._step)
            while self._expected and not self._report.differences:
                received = await published.receive(self._patience())
                if received is not None:
                    await self._heard(*received)
                elif self._is_parting():
                    self.drain.set()
                elif not self._owed():
                    break
                elif not self._computing:  # a step of a large model takes its time
                    self._give_up()
                    return
        if self._beyond and not self._report.differences:
            reason = f"requests of lineage {self._lineage.name} in a step whose end was not recorded"
            self._report.skipped[reason] += len(self._beyond)

    def _owed(self) -> int:
        """Messages that have to come."""
        return len(self._expected) - len(self._beyond)

    def _is_parting(self) -> bool:
        """True when nothing has to come any more but what a learner stores that is told to stop."""
        return self._owed() == 1 and self._goodbye in self._expected and not self.drain.is_set()

    def _patience(self) -> float:
        if self._is_parting():
            return ADMISSION_SECONDS if self._beyond else 0.0
        return self._patience_seconds if self._owed() else ADMISSION_SECONDS

    async def _heard(self, entry: StreamEntry, message: Message) -> None:
        key = key_of(entry.subject, message)
        recorded = self._expected.pop(key, None)
        if recorded is None:
            if self._lineage.is_whole:
                self._differ(key, 0, "type", "(nothing)", type(message).__name__)
            else:
                self._report.skipped[f"messages beyond the recorded end of lineage {self._lineage.name}"] += 1
            return
        self._beyond.discard(key)
        self._progress.advance()
        self._stage.positions.note(recorded[0].sequence, entry.sequence)
        self._report.compared[type(message).__name__] += 1
        found = first_difference(_in_order(recorded[1]), _in_order(message), ignored=self._ignored)
        if found is not None:
            self._differ(key, recorded[0].sequence, *found)
        elif isinstance(message, EpisodeRequested):
            await self._asked_for(message)
        elif isinstance(message, StepTrained):
            self._step = message.step + 1
            await self._feed_all(self._step)

    async def _asked_for(self, request: EpisodeRequested) -> None:
        """Its result comes at once if it is evaluated, else with the others of its step."""
        story = self._stories[request.episode_id]
        self._asked.notify()
        if request.split == "eval":
            await self._feed(story)
        else:
            await self._due_in_its_step(story)

    async def _due_in_its_step(self, story: Told) -> None:
        step = self._consumed.get(story.request.episode_id, self._last_step + 1)
        self._unasked[step].discard(story.request.episode_id)
        self._ready[step].append(story)
        if step <= self._step and not (self._unasked[step] and self._trains(step, story)):
            await self._feed_all(step)

    def _trains(self, step: int, story: Told) -> bool:
        return story.request.episode_id in self._trained_in[step]

    async def _feed_all(self, step: int) -> None:
        """Results of a step; none of one whose end was not recorded, as nobody knows what it took.

        What the step excluded comes first: a batch is taken as soon as its last group is complete, so those that it trained
        wait until all that it consumed is asked for.
        """
        if step > self._last_step and not self._lineage.is_whole:
            return
        ready = sorted(self._ready.pop(step, []), key=lambda story: story.result_entry.sequence if story.result_entry else 0)
        ready.sort(key=lambda story: self._trains(step, story))
        for number, story in enumerate(ready):
            if self._trains(step, story) and self._unasked[step]:
                self._ready[step] = ready[number:]
                return
            await self._feed(story)

    async def _feed(self, story: Told) -> None:
        """The Actions that the result names, then the result with the positions that they have here."""
        if story.result is None or story.result_entry is None:
            return
        await self._pace.wait(story.result_entry)
        if story.result.split == "train":
            for entry in story.trained:
                self._stage.feed_as_recorded(entry)
        positions = self._stage.positions
        self._stage.feed(story.result_entry.subject, positions.translated(story.result, positions.new), story.result_entry)

    def untrained(self, *, masked: bool) -> RecordedTrainer:
        """What stands in for training."""
        messages = [message for _, message in self._expected.values()]

        def wrong(step: int, found: WrongBatch) -> None:
            name, sequence = ("batch of step", str(step), "episode", found.episode_id), self._position(found.episode_id)
            self._differ(name, sequence, found.field, found.recorded, found.replayed)

        return RecordedTrainer(
            self._lineage.start,
            {message.step: message for message in messages if isinstance(message, StepTrained)},
            {
                each.version: inline_manifest(each, self._stage.objects)
                for each in messages
                if isinstance(each, PolicyPublished)
            },
            episode=self._recorded,
            wrong=wrong,
            overlong_masked=masked,
        )

    def _recorded(self, episode_id: str) -> Trained | None:
        told = self._stories.get(episode_id)
        if told is None or told.result is None:
            return None
        return Trained(result=told.result, actions=tuple(action for _, action in decode_entries(Action, told.trained)))

    def _position(self, episode_id: str) -> int:
        told = self._stories.get(episode_id)
        return told.result_entry.sequence if told is not None and told.result_entry is not None else 0

    def _differ(self, key: Key, sequence: int, field: str, recorded: str, replayed: str) -> None:
        context = [f"after {self._report.compared['StepTrained']} steps that were compared"]
        if self._lineage.started.parent:
            context.append(f"lineage {self._lineage.name}, from step {self._lineage.start} on")
        self._report.differences.append(
            Difference(
                message=" ".join(key),
                field=field,
                recorded=recorded,
                replayed=replayed,
                sequence=sequence,
                context=tuple(context),
            )
        )

    def _give_up(self) -> None:
        key, (entry, message) = min(self._expected.items(), key=lambda each: each[1][0].sequence)
        silence = f"nothing within {self._patience_seconds:g} s"
        self._differ(key, entry.sequence, "type", type(message).__name__, silence)


def _in_order(message: Message) -> Message:
    """What a step excluded, by name: in which order follows from the moments at which a learner looked."""
    if isinstance(message, StepTrained | TrainingFinished):
        return msgspec.structs.replace(message, excluded=tuple(sorted(message.excluded, key=lambda each: each.episode_id)))
    return message


def _unscheduled(lineage: Lineage, settings: LearnerSettings) -> list[Key]:
    """Checkpoints that were not due: that of the last step was stored because the learner was told to stop, others because the
    log had no room."""
    stored = [message for _, message in lineage.published.values() if isinstance(message, CheckpointStored)]
    due = {settings.steps, *range(0, lineage.last_step + 1, settings.checkpoint_every)}
    return [_checkpoint(each.step) for each in stored if each.step not in due]


def _checkpoint(step: int) -> Key:
    return ("CheckpointStored", f"step {step}")


def _undecided(lineage: Lineage) -> set[Key]:
    """Requests after the last recorded step of a lineage that was cut: some follow from what the step after it took, which
    nobody knows."""
    if lineage.is_whole:
        return set()
    last = max((entry.sequence for entry, message in lineage.published.values() if isinstance(message, StepTrained)), default=0)
    return {
        key
        for key, (entry, message) in lineage.published.items()
        if isinstance(message, EpisodeRequested) and entry.sequence > last
    }
