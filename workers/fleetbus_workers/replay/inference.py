"""Replay of the inference role: recorded Observations against a real worker with the recorded versions of the weights.

Version after version, episode beside episode, turn after turn: each Action that one version sampled alone is asked for again
and compared: token ids exactly, log-probabilities within a tolerance. Its tokens are sampled again from the recorded seed (or
greedily, as recorded), or a `Scorer` shows by one forward pass that they would be.
Before a turn that is asked for, Actions that cannot be sampled again are put into the log as they were recorded, so that it
stands on the same history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.logs import REDACTED
from fleetbus.recording import Recording
from fleetbus.recording.redaction import is_wiped
from fleetbus_schemas import ANY_LANE, Action, AttemptStarted, LineageStarted, Message, PolicyPublished
from fleetbus_schemas.message import MalformedMessage, decode_any
from fleetbus_workers.inference.base import ImageSource, Sampler, Template
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.replay.compare import LOGPROB_TOLERANCE, first_difference
from fleetbus_workers.replay.expected import Expected, Scorer, expected_turns
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import UNLOADED, Difference, Report
from fleetbus_workers.replay.stage import PATIENCE_SECONDS, WORKER, Pace, Stage, perform, staged
from fleetbus_workers.replay.story import Asked, Story, read_stories
from fleetbus_workers.replay.wrapped_sampler import WatchedSampler
from fleetbus_workers.weights.manifests import inline_manifest

LANE = "e0"
"""The environment lane that the replayed episodes are said to run on."""


async def replay_inference(
    recording: Recording,
    sampler: Sampler,
    template: Template,
    *,
    configuration: Configuration,
    weights: dict[str, Path] | None = None,
    speed: float | None = None,
    ignored: frozenset[str] = frozenset(),
    tolerance: float = LOGPROB_TOLERANCE,
    patience_seconds: float = PATIENCE_SECONDS,
    scorer: Scorer | None = None,
    images: Callable[[Bus], ImageSource | None] = lambda bus: None,
    progress: Progress | None = None,
) -> Report:
    """Answer every Observation again and compare the Actions. ``weights`` are files by their recorded name, for versions whose
    recorded URI does not exist any more; what no weights are found for is skipped. ``scorer`` is told beforehand which turns
    of a version come; it stands in ``sampler``. ``images`` shows the recorded objects to a model that sees."""
    report = Report(role="inference", recorded_seconds=recording.seconds)
    stories = list(read_stories(recording.entries).values())
    policy = configuration.run.policy
    async with staged(recording, configuration, pools=(configuration.run.pool,), policies=(policy,)) as stage:
        watched = WatchedSampler(sampler)
        progress = progress or Progress()
        progress.expect(sum(len(story.turns) for story in stories))
        pace = Pace(recording, speed)
        director = _Director(stage, watched, report, pace, ignored, tolerance, patience_seconds, scorer, progress)

        async def work(bus: Bus, drain: anyio.Event) -> None:
            await run_inference(
                bus,
                configuration=configuration,
                name=WORKER,
                drain=drain,
                sampler=watched,
                template=template,
                images=images(bus),
            )

        async def direct() -> None:
            await director.direct(list(_published(recording, policy)), stories, weights or {})

        await perform(stage, work, direct)
    return report


class _Director:
    def __init__(
        self,
        stage: Stage,
        sampler: WatchedSampler,
        report: Report,
        pace: Pace,
        ignored: frozenset[str],
        tolerance: float,
        patience_seconds: float,
        scorer: Scorer | None,
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._sampler = sampler
        self._scorer = scorer
        self._report = report
        self._pace = pace
        self._ignored = ignored
        self._tolerance = tolerance
        self._patience_seconds = patience_seconds
        self._progress = progress
        self._waiting: dict[tuple[str, int], anyio.Event] = {}
        self._answers: dict[tuple[str, int], Action] = {}
        self._next: dict[str, int] = {}
        self._laid: dict[str, int] = {}
        """By episode how many of its turns are in the stage's log."""
        self._stopped: set[str] = set()
        self._due: dict[int, list[tuple[int, Story]]] = {}
        self._unloadable = ""
        self._gone = False

    async def direct(
        self, versions: list[tuple[StreamEntry, PolicyPublished]], stories: list[Story], weights: dict[str, Path]
    ) -> None:
        if not versions:
            raise UserError("the recording has no published version of the policy: nothing can be sampled")
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen)
            self._due = {0: list(enumerate(stories))}
            for entry, published in versions:
                if await self._load(entry, published, weights):
                    await self._play_version(published.version)
            left = sum(len(story.turns) - self._next.get(story.episode_id, 0) for story in stories)
            if self._gone:
                self._report.advice = (
                    f"to compare all of them: fleetbus up --learner-keep-weights {max(len(versions), 2)} (or more), "
                    "then fleetbus record RUN --weights"
                )
            if left:
                self._report.skipped["actions whose version is not at hand, or after one that differs"] += left
            group.cancel_scope.cancel()

    async def _load(self, entry: StreamEntry, published: PolicyPublished, weights: dict[str, Path]) -> bool:
        await self._pace.wait(entry)
        published = inline_manifest(published, self._stage.objects)
        name = published.uri.rpartition("/")[2]
        if name in weights:
            published = msgspec.structs.replace(published, uri=weights[name].absolute().as_uri())
        self._sampler.rejected = ""
        self._stage.feed(entry.subject, published, entry)
        if published.version <= self._sampler.version and self._next:
            return False
        with anyio.fail_after(self._patience_seconds):
            await self._sampler.settled()
        if self._sampler.rejected:
            self._gone |= not _path(published.uri).is_file()
            self._unloadable = self._unloadable or f"{UNLOADED} (the first: {_once(self._sampler.rejected, published.uri)})"
            self._report.skipped[self._unloadable] += 1
            return False
        return True

    async def _play_version(self, version: int) -> None:
        """All turns of this version whose turns before are in the log; as many episodes at once as the worker has slots for the
        shared lane, so that what is asked is being answered."""
        slots = self._stage.configuration.inference.slots
        due = [story for newest in tuple(self._due) if newest <= version for story in self._due.pop(newest)]
        if self._scorer is not None:
            await self._scorer.prepare([turn for _, story in due for turn in self._expected(story, version)])
        waiting = deque(sorted(due, key=lambda numbered: numbered[0]))

        async def play() -> None:
            while waiting:
                number, story = waiting.popleft()
                await self._play(story, version)
                turn = self._next.get(story.episode_id, 0)
                if story.episode_id not in self._stopped and turn < len(story.turns):
                    self._due.setdefault(_newest_version(story.turns[turn]), []).append((number, story))

        async with anyio.create_task_group() as group:
            for _ in range(min(len(waiting), slots - slots // 2)):
                group.start_soon(play)

    def _expected(self, story: Story, version: int) -> Iterable[Expected]:
        """What will be asked of this version, from the story's next turn on."""
        start = self._next.get(story.episode_id, 0)
        for asked, expected in expected_turns(story.turns):
            if (
                _newest_version(asked) == version
                and asked.observation.turn >= start
                and not _unrepeatable(story, asked, self._stage.objects)
            ):
                yield expected

    async def _play(self, story: Story, version: int) -> None:
        start = self._next.get(story.episode_id, 0)
        for turn in range(start, len(story.turns)):
            asked = story.turns[turn]
            if _newest_version(asked) > version:
                return
            self._progress.advance()
            reason = _unrepeatable(story, asked, self._stage.objects)
            if not reason and _newest_version(asked) < version:
                reason = "actions whose version is not at hand"
            if reason:
                self._report.skipped[reason] += 1
            else:
                self._lay(story, turn)
                if not await self._compare(story, asked):
                    self._stopped.add(story.episode_id)
                    return
            self._next[story.episode_id] = turn + 1

    def _lay(self, story: Story, turn: int) -> None:
        """Let the log hold all before this turn; it will hold the turn."""
        laid = self._laid.get(story.episode_id)
        if laid is None:
            self._claim(story)
        for asked in story.turns[laid or 0 : turn]:
            self._give(asked)
        self._laid[story.episode_id] = turn + 1

    def _claim(self, story: Story) -> None:
        """Histories are rebuilt from claims and Actions: one attempt stands for all that were."""
        claim = AttemptStarted(episode_id=story.episode_id, attempt=1, worker="recorded", nonce="recorded", lane=LANE)
        first = story.turns[0].observation_entry
        self._stage.feed(self._stage.subjects.episode(story.episode_id), claim, msgspec.structs.replace(first, sequence=0))

    def _give(self, asked: Asked) -> None:
        """Put a recorded Action into the log as it was."""
        if asked.action is None or asked.action_entry is None:
            return
        action = msgspec.structs.replace(asked.action, attempt=1)
        self._stage.feed(self._stage.subjects.action(LANE, action.episode_id), action, asked.action_entry)

    async def _compare(self, story: Story, asked: Asked) -> bool:
        """Ask again; True if the answer is the recorded one."""
        assert asked.action is not None and asked.action_entry is not None
        key = (story.episode_id, asked.observation.turn)
        answered = self._waiting[key] = anyio.Event()
        await self._pace.wait(asked.observation_entry)
        self._ask(asked)
        with anyio.move_on_after(self._patience_seconds):
            await answered.wait()
        del self._waiting[key]
        action = self._answers.pop(key, None)
        if action is None:
            silence = f"nothing within {self._patience_seconds:g} s"
            self._report.differences.append(self._different(story, asked, "type", "Action", silence))
            return False
        self._report.compared["Action"] += 1
        replayed = msgspec.structs.replace(action, attempt=asked.action.attempt)
        found = first_difference(asked.action, replayed, ignored=self._ignored, tolerance=self._tolerance)
        if found is not None:
            self._report.differences.append(self._different(story, asked, *found))
        return found is None

    def _ask(self, asked: Asked) -> None:
        observation = asked.observation
        observation = msgspec.structs.replace(
            observation,
            attempt=1,
            hop=0,
            environment_lane=LANE,
            action_sequence=self._stage.last_sequence_on(self._stage.subjects.action(LANE, observation.episode_id)),
            request_sequence=0,
            pinned_version=None,
        )
        subject = self._stage.subjects.observation(observation.policy, ANY_LANE, observation.episode_id)
        self._stage.feed(subject, observation, asked.observation_entry)

    async def _listen(self) -> None:
        with self._stage.published("act", types=(Action,)) as published:
            while (received := await published.receive(math.inf)) is not None:
                _, message = received
                assert isinstance(message, Action)
                key = (message.episode_id, message.turn)
                if message.worker == WORKER and key in self._waiting:
                    self._answers[key] = message
                    self._waiting[key].set()

    def _different(self, story: Story, asked: Asked, field: str, recorded: str, replayed: str) -> Difference:
        assert asked.action is not None and asked.action_entry is not None
        shown = [f"{message.role}: {str(message.content)[:200]!r}" for message in asked.observation.messages[-1:]]
        versions = ", ".join(str(span.version) for span in asked.action.versions)
        return Difference(
            message=f"Action of turn {asked.observation.turn} of episode {story.episode_id}",
            field=field,
            recorded=recorded,
            replayed=replayed,
            sequence=asked.action_entry.sequence,
            episode_id=story.episode_id,
            context=(f"sampled by version {versions}", f"recorded text: {asked.action.text[:200]!r}", *shown),
        )


def _path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _once(rejected: str, uri: str) -> str:
    """Why a file was rejected; reasons of the operating system end with its path, which stands at the beginning already."""
    path = _path(uri)
    return rejected.removesuffix(f": {path}").removesuffix(f": '{path}'")


def _published(recording: Recording, policy: str) -> Iterable[tuple[StreamEntry, PolicyPublished]]:
    """Every published version in order."""
    subject = recording.subjects.policy(policy)
    for entry in recording.entries:
        if entry.subject == subject:
            try:
                message: Message = decode_any((PolicyPublished, LineageStarted), entry.payload, subject=entry.subject)
            except MalformedMessage:
                continue
            if isinstance(message, PolicyPublished):
                yield entry, message


def _newest_version(asked: Asked) -> int:
    """The version of its newest token, with which it is due; 0 for what has no tokens and is due at once."""
    return asked.action.versions[-1].version if asked.action is not None and asked.action.versions else 0


def _unrepeatable(story: Story, asked: Asked, objects: Container[str]) -> str:
    """Why a recorded Action cannot be expected again; empty if it can."""
    action = asked.action
    if action is None:
        return "observations without a recorded action"
    if action.finish_reason == "failed":
        return f"failed actions ({action.error_class})"
    if len(action.versions) > 1:
        return "actions that several versions sampled"
    ids = (action.prompt_delta, action.sampled)
    if any(is_wiped(each) for each in ids) or REDACTED in repr((asked.observation.messages, action.text)):
        return "actions of which something was redacted"
    if any(name not in objects for name in _shown(story, asked)):
        return "actions upon images that the recording does not hold"
    return ""


def _shown(story: Story, asked: Asked) -> Iterable[str]:
    """The images that the model was shown up to this turn."""
    for each in story.turns:
        if each.action is not None and each.observation.turn <= asked.observation.turn:
            yield from (image.object for image in each.action.images)
