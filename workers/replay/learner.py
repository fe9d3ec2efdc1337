"""Replay of the learner role: recorded episodes to the same requests, batches, metrics and, on a CPU, the same weights.

Without a trainer it goes as far as the batches: `workers.replay.untrained` stands in for training.

A result is fed when the replayed learner has asked for its episode, and in the step that consumed it in the recording: then the
groups that are complete are those that were complete when the recorded batch was taken. Tasks come from the recorded requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec

from fleetbus.bus.base import Bus, Stored
from fleetbus.config.settings import Configuration, WeightsSettings
from fleetbus.episodes import decoded, episode_entry
from fleetbus.errors import UserError
from fleetbus.ports import Ports, run_in_thread
from fleetbus.recording import Recording
from fleetbus.recording.objects import referenced_objects
from schemas import (
    Action,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    Task,
    TrainingFinished,
)
from schemas.message import MalformedMessage, decode_any
from workers.learner.base import Trainer
from workers.learner.curriculum import Curriculum
from workers.learner.worker import run_learner
from workers.replay.compare import first_difference
from workers.replay.manifests import with_manifest
from workers.replay.report import TRAINING, Difference, Report
from workers.replay.stage import PATIENCE_SECONDS, WORKER, Pace, Stage, perform, staged
from workers.replay.untrained import RecordedTrainer, Trained, WrongBatch

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

ADMISSION_SECONDS = 5.0
"""Longest that training waits for requests that were recorded before it ended."""

Key = tuple[str, ...]


async def replay_learner(
    recording: Recording,
    trainer: Trainer | None,
    *,
    configuration: Configuration,
    folder: Path,
    speed: float | None = None,
    ignored: frozenset[str] = frozenset(),
    patience_seconds: float = PATIENCE_SECONDS,
) -> Report:
    """Train the recorded episodes again with a fresh ``trainer`` and compare everything the learner publishes. Without a
    trainer the replay ends at the batches, and what training computes is taken from the recording.

    Weights and checkpoints are written below ``folder``. Of a run whose learner was replaced, the first lineage is replayed.
    Raises `UserError` when the recording does not hold the beginning of the training.
    """
    report = Report(role="learner", recorded_seconds=recording.seconds)
    began = anyio.current_time()
    expected = _expected(recording)
    stories = read_told(recording)
    _check_images(recording, stories.values())
    run = msgspec.structs.replace(configuration.run, folder=str(folder))
    configuration = msgspec.structs.replace(configuration, run=run)
    if trainer is None:  # differences to weights that nobody has cannot be made
        ignored |= {"PolicyPublished.size_bytes"} if configuration.weights.full_every > 1 else set()
        configuration = msgspec.structs.replace(configuration, weights=WeightsSettings())
    async with staged(recording, configuration, pools=(run.pool,), policies=(run.policy,)) as stage:
        director = _Director(stage, expected, stories, report, Pace(recording, speed), ignored, patience_seconds)
        training = trainer or director.untrained(masked=configuration.algorithm.overlong == "mask")
        for files in ("weights", "checkpoints"):
            await anyio.Path(folder / run.name / files).mkdir(parents=True, exist_ok=True)

        async def work(bus: Bus, drain: anyio.Event) -> None:
            await run_learner(
                bus,
                configuration=configuration,
                name=WORKER,
                drain=drain,
                trainer=training,
                curriculum=cast(Curriculum, _RecordedTasks(stories.values())),
                ports=Ports(offload=director.offload),
            )

        await perform(stage, work, director.direct)
    if trainer is not None:
        report.checked = "checked: requests, groups, advantages, batches, evaluations, lineage, and what training makes of them"
        report.measured = {TRAINING: director.seconds.get("train", 0.0)}
    if isinstance(training, RecordedTrainer):
        _tell_of_batches(report, training)
    report.seconds = anyio.current_time() - began
    return report


def _tell_of_batches(report: Report, training: RecordedTrainer) -> None:
    report.checked = (
        "checked: requests, groups, advantages, batches, evaluations, lineage; not checked: loss, gradients, weights (--until)"
    )
    report.notes["training sequences that are the recorded ones, token by token"] += training.sequences
    report.notes["sampled tokens in them"] += training.tokens


class Told(msgspec.Struct, kw_only=True):
    """What a learner reads of one episode; ``actions`` by the positions where they were recorded."""

    request: EpisodeRequested
    result: EpisodeFinished | None = None
    result_entry: Stored | None = None
    actions: dict[int, Stored] = msgspec.field(default_factory=dict)

    @property
    def trained(self) -> Iterator[Stored]:
        """The Actions that the result names, in order."""
        for reference in self.result.actions if self.result is not None else ():
            if (entry := self.actions.get(reference.sequence)) is not None:
                yield entry


def read_told(recording: Recording) -> dict[str, Told]:
    """All episodes of which the request was recorded, in order. Actions stay as they are: the learner decodes them."""
    found: dict[str, Told] = {}
    for entry in recording.entries:
        _, _, kind, rest = entry.subject.split(".", 3)
        if kind not in ("task", "act", "episode"):
            continue
        told = found.get(rest.rpartition(".")[2])
        if kind == "task" and told is None:
            for _, request in decoded(EpisodeRequested, [entry]):
                found[request.episode_id] = Told(request=request)
        elif told is None:
            continue
        elif kind == "act":
            told.actions[entry.sequence] = entry
        elif told.result is None and isinstance(message := episode_entry(entry), EpisodeFinished):
            told.result, told.result_entry = message, entry
    return found


def _check_images(recording: Recording, stories: Iterable[Told]) -> None:
    """A learner trains on the images that its Actions show: without them it would leave their episodes out."""
    named = {name for told in stories for entry in told.trained for name in referenced_objects(entry)}
    missing = len(named - set(recording.objects))
    if missing:
        raise UserError(f"{recording.path} lacks {missing} of {len(named)} images: record the run again, with its objects")


class _RecordedTasks:
    """The curriculum as the recording shows it."""

    def __init__(self, stories: Any) -> None:
        self._by_group: dict[str, Task] = {}
        self.held_out: list[Task] = []
        evaluated: dict[str, dict[int, Task]] = {}
        for story in stories:
            request = story.request
            if request.split == "train":
                self._by_group.setdefault(request.group_id, request.task)
            else:
                name, _, number = request.episode_id.rpartition("-")
                evaluated.setdefault(name, {})[int(number) if number.isdigit() else len(evaluated[name])] = request.task
        if evaluated:
            fullest = max(evaluated.values(), key=len)
            self.held_out = [fullest[number] for number in sorted(fullest)]

    def task(self, number: int) -> Task:
        """The recorded task of that group; beyond the recording any will do."""
        return self._by_group.get(f"g{number:06d}") or Task(key="beyond-the-recording")

    def evaluation(self, count: int) -> list[Task]:
        return self.held_out[:count]


class _Director:
    """Feeds results and compares what the learner publishes, until all of it came or something differs."""

    def __init__(
        self,
        stage: Stage,
        expected: dict[Key, tuple[Stored, Message]],
        stories: dict[str, Told],
        report: Report,
        pace: Pace,
        ignored: frozenset[str],
        patience_seconds: float,
    ) -> None:
        self._stage = stage
        self._expected = expected
        self._stories = stories
        self._report = report
        self._pace = pace
        self._ignored = ignored
        self._patience_seconds = patience_seconds
        self._is_whole = any(isinstance(message, TrainingFinished) for _, message in expected.values())
        steps = [message for _, message in expected.values() if isinstance(message, StepTrained)]
        self._last_step = max((step.step for step in steps), default=0)
        self._consumed = _consumed(steps)
        self._step = 1
        self._ready: dict[int, list[Told]] = {}
        self._steps = {step.step: self._place(step) for step in steps}
        self._due = deque(key for key, (_, message) in expected.items() if isinstance(message, EpisodeRequested))
        self._training = self._computing = 0
        self.seconds: dict[str, float] = {}
        """What blocking work took, by the name of its function."""
        self._asked = anyio.Event()

    def _place(self, message: StepTrained) -> int:
        return self._expected[_key("", message)][0].sequence

    async def offload(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Blocking work of the learner. It trains no faster than it asked for episodes meanwhile, in the recording; with the
        last batch taken, whatever else was recorded may come in."""
        name = getattr(function, "__name__", "")
        if name == "train":
            self._training += 1
            await self._asked_before(self._steps.get(self._training, 0))
            if self._step >= self._last_step:
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
                    self._asked = anyio.Event()
                    await self._asked.wait()
                else:
                    return

    async def direct(self) -> None:
        with self._stage.published("task", "train", "policy", types=COMPARED) as published:
            while self._expected and not self._report.differences:
                received = await published.receive(self._patience_seconds)
                if received is not None:
                    await self._heard(*received)
                elif not self._computing:  # a step of a large model takes its time
                    self._give_up()
                    return

    async def _heard(self, entry: Stored, message: Message) -> None:
        key = _key(entry.subject, message)
        recorded = self._expected.pop(key, None)
        if recorded is None:
            if self._is_whole:
                self._differ(key, 0, "type", "(nothing)", type(message).__name__)
            else:
                self._report.skipped["messages beyond the end of the recording"] += 1
            return
        self._stage.positions.note(recorded[0].sequence, entry.sequence)
        self._report.compared[type(message).__name__] += 1
        found = first_difference(recorded[1], message, ignored=self._ignored)
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
        self._asked.set()
        if request.split == "eval":
            await self._feed(story)
            return
        step = self._consumed.get(request.episode_id, self._last_step + 1)
        if step <= self._step:
            await self._feed(story)
        else:
            self._ready.setdefault(step, []).append(story)

    async def _feed_all(self, step: int) -> None:
        for story in self._ready.pop(step, []):
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
            {message.step: message for message in messages if isinstance(message, StepTrained)},
            {each.version: with_manifest(each, self._stage.objects) for each in messages if isinstance(each, PolicyPublished)},
            episode=self._trained,
            wrong=wrong,
            overlong_masked=masked,
        )

    def _trained(self, episode_id: str) -> Trained | None:
        told = self._stories.get(episode_id)
        if told is None or told.result is None:
            return None
        return Trained(result=told.result, actions=tuple(action for _, action in decoded(Action, told.trained)))

    def _position(self, episode_id: str) -> int:
        told = self._stories.get(episode_id)
        return told.result_entry.sequence if told is not None and told.result_entry is not None else 0

    def _differ(self, key: Key, sequence: int, field: str, recorded: str, replayed: str) -> None:
        after = f"after {self._report.compared['StepTrained']} steps that were compared"
        self._report.differences.append(
            Difference(
                message=" ".join(key),
                field=field,
                recorded=recorded,
                replayed=replayed,
                sequence=sequence,
                context=(after,),
            )
        )

    def _give_up(self) -> None:
        key, (entry, message) = min(self._expected.items(), key=lambda each: each[1][0].sequence)
        silence = f"nothing within {self._patience_seconds:g} s"
        self._differ(key, entry.sequence, "type", type(message).__name__, silence)


def _expected(recording: Recording) -> dict[Key, tuple[Stored, Message]]:
    """What the first lineage published, in order, by what it is called; raises `UserError`."""
    found: dict[Key, tuple[Stored, Message]] = {}
    lineage = ""
    for entry in recording.entries:
        if entry.subject.split(".", 3)[2] not in ("task", "train", "policy"):
            continue
        try:
            message = decode_any(COMPARED, entry.payload, subject=entry.subject)
        except MalformedMessage:
            continue
        if isinstance(message, LineageStarted):
            if lineage and message.lineage != lineage:
                break
            lineage = message.lineage
            if message.parent:
                raise UserError(
                    f"{recording.path} begins with lineage {lineage} of {message.parent}: record the run from its start"
                )
        if not lineage:
            raise UserError(f"{recording.path} does not hold the beginning of the training: record the whole run")
        if isinstance(message, EpisodeRequested) and message.lineage != lineage:
            continue  # another client's
        found.setdefault(_key(entry.subject, message), (entry, message))
    if not found:
        raise UserError(f"{recording.path} holds nothing that a learner published: record the whole run, without --episode")
    return found


def _key(subject: str, message: Message) -> Key:
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


def _consumed(steps: Sequence[StepTrained]) -> dict[str, int]:
    """The step that trained or excluded each episode."""
    consumed: dict[str, int] = {}
    for step in steps:
        for episode_id in (*step.episodes, *(each.episode_id for each in step.excluded)):
            consumed.setdefault(episode_id, step.step)
    return consumed
