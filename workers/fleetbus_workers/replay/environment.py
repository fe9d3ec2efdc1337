"""Replay of the environment role: recorded requests and Actions against fresh environments of a real worker.

Each recorded episode is played in one attempt along its final history. What has no cause in environment or policy (a worker
that died, an expired deadline, a cancellation) cannot be replayed and is left out, with its outcome as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.config.settings import Configuration
from fleetbus.recording import Recording
from fleetbus.recording.redaction import Redactor
from fleetbus_schemas import (
    Action,
    ControlRequested,
    EpisodeFinished,
    Message,
    Observation,
    decode,
    encode,
)
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.replay.compare import first_difference
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import Difference, Report
from fleetbus_workers.replay.stage import PATIENCE_SECONDS, WORKER, Pace, Stage, perform, staged
from fleetbus_workers.replay.story import Asked, Story, read_stories
from fleetbus_workers.replay.twins import distinct_stories

OUTSIDE_CAUSES = frozenset({"timeout", "lost", "cancelled", "stale"})
"""Outcomes that neither environment nor policy decided."""

COMPARED: tuple[type[Message], ...] = (Observation, EpisodeFinished)


async def replay_environment(
    recording: Recording,
    make: Callable[[], Environment],
    *,
    configuration: Configuration,
    speed: float | None = None,
    ignored: frozenset[str] = frozenset(),
    patience_seconds: float = PATIENCE_SECONDS,
    distinct: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Play every episode again and compare each Observation and result. ``make`` makes one environment per episode. With
    ``distinct`` episodes that are alike are played once (`fleetbus_workers.replay.twins`)."""
    report = Report(role="environment", recorded_seconds=recording.seconds)
    playable = _playable(read_stories(recording.entries).values(), report)
    stories = {story.episode_id: story for story in (distinct_stories(playable, report) if distinct else playable)}
    pools = tuple({_pool(story) for story in stories.values()}) or (configuration.run.pool,)
    policies = tuple({story.request.policy for story in stories.values() if story.request}) or (configuration.run.policy,)
    run = msgspec.structs.replace(configuration.run, pool=pools[0])
    configuration = msgspec.structs.replace(configuration, run=run)
    async with staged(recording, configuration, pools=pools, policies=policies) as stage:
        progress = progress or Progress()
        progress.expect(len(stories))
        director = _Director(stage, stories, report, Pace(recording, speed), ignored, patience_seconds, progress)
        director.redacted = recording.header.redacted

        async def work(bus: Bus, drain: anyio.Event) -> None:
            await run_environment(bus, configuration=configuration, name=WORKER, drain=drain, make=make)

        if stories:
            await perform(stage, work, director.direct)
    return report


def _playable(stories: Iterable[Story], report: Report) -> Iterable[Story]:
    for story in stories:
        if story.request is None:
            report.skipped["episodes without a request in the recording"] += 1
        elif story.result is not None and story.result.outcome in OUTSIDE_CAUSES:
            report.skipped[f"episodes with outcome {story.result.outcome}"] += 1
        elif not story.turns:
            report.skipped["episodes without a recorded turn"] += 1
        elif story.redacted:
            report.skipped["episodes of which something was redacted"] += 1
        else:
            yield story


class _Director:
    """Feeds and compares all episodes; those that differ are cancelled and go no further."""

    def __init__(
        self,
        stage: Stage,
        stories: dict[str, Story],
        report: Report,
        pace: Pace,
        ignored: frozenset[str],
        patience_seconds: float,
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._stories = stories
        self._report = report
        self._pace = pace
        self._ignored = ignored
        self._patience_seconds = patience_seconds
        self._progress = progress
        self._open = dict.fromkeys(stories)
        self._next = dict.fromkeys(stories, 0)
        self._redactor = Redactor()
        self.redacted = True

    async def direct(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._request_all)
            await self._compare_all(group)
            group.cancel_scope.cancel()

    async def _request_all(self) -> None:
        for story in self._stories.values():
            assert story.request is not None and story.request_entry is not None
            await self._pace.wait(story.request_entry)
            self._stage.feed(story.request_entry.subject, story.request, story.request_entry)

    async def _compare_all(self, group: anyio.abc.TaskGroup) -> None:
        with self._stage.published("obs", "episode", types=COMPARED) as published:
            while self._open:
                received = await published.receive(self._patience_seconds)
                if received is None:
                    self._give_up()
                    return
                entry, message = received
                episode_id = entry.subject.rpartition(".")[2]
                if episode_id in self._open:
                    await self._heard(self._stories[episode_id], entry, message, group)

    async def _heard(self, story: Story, entry: StreamEntry, message: Message, group: anyio.abc.TaskGroup) -> None:
        if isinstance(message, Observation):
            if message.turn < self._next[story.episode_id]:
                return  # sent again
            difference = self._observed(story, entry, message)
        else:
            assert isinstance(message, EpisodeFinished)
            difference = self._finished(story, entry, message)
            self._close(story)
        if difference is not None:
            self._report.differences.append(difference)
            if story.episode_id in self._open:
                self._close(story)
                await self._cancel(story.episode_id)
        elif isinstance(message, Observation):
            await self._answer(story, message, group)

    def _observed(self, story: Story, entry: StreamEntry, observation: Observation) -> Difference | None:
        turn = self._next[story.episode_id]
        if turn >= len(story.turns) or observation.turn != turn:
            recorded = f"{story.result.outcome} after {len(story.turns)} turns" if story.result else "(nothing)"
            return self._different(story, "EpisodeFinished", "type", recorded, f"Observation of turn {observation.turn}")
        self._next[story.episode_id] = turn + 1
        asked = story.turns[turn]
        position = self._stage.positions.recorded(observation.request_sequence)
        observation = msgspec.structs.replace(observation, request_sequence=position)
        return self._compared(story, entry, asked.observation, observation, asked.observation_entry.sequence)

    def _finished(self, story: Story, entry: StreamEntry, result: EpisodeFinished) -> Difference | None:
        turn = self._next[story.episode_id]
        if turn < len(story.turns):
            shown = f"EpisodeFinished {result.outcome} {result.error_class} {result.error}".strip()
            return self._different(story, f"Observation of turn {turn}", "type", "Observation", shown)
        if story.result is None or story.result_entry is None:
            return None  # the recording ends before the episode did
        translated = self._stage.positions.translated(result, self._stage.positions.recorded)
        return self._compared(story, entry, story.result, translated, story.result_entry.sequence)

    def _compared(
        self, story: Story, entry: StreamEntry, recorded: Message, replayed: Message, sequence: int
    ) -> Difference | None:
        kind = type(recorded).__name__
        self._report.compared[kind] += 1
        found = first_difference(recorded, replayed, ignored=self._ignored)
        if found is not None and self.redacted:  # what was taken out of the recorded one is no difference
            found = first_difference(recorded, self._cleaned(entry, replayed), ignored=self._ignored)
        if found is None:
            return None
        what = f"{kind} of turn {recorded.turn}" if isinstance(recorded, Observation) else kind
        return self._different(story, what, found.field, found.recorded, found.replayed, sequence)

    def _cleaned(self, entry: StreamEntry, message: Message) -> Message:
        """What a recorder that redacts would have kept of it."""
        cleaned = self._redactor.clean(msgspec.structs.replace(entry, payload=encode(message)))
        return decode(type(message), cleaned.payload, subject=entry.subject)

    def _different(self, story: Story, what: str, field: str, recorded: str, replayed: str, sequence: int = 0) -> Difference:
        if not sequence:
            sequence = story.result_entry.sequence if story.result_entry else story.turns[-1].observation_entry.sequence
        return Difference(
            message=f"{what} of episode {story.episode_id}",
            field=field,
            recorded=recorded,
            replayed=replayed,
            sequence=sequence,
            episode_id=story.episode_id,
            context=tuple(self._context(story)),
        )

    def _context(self, story: Story) -> Iterable[str]:
        assert story.request is not None
        yield f"task {story.request.task.key}"
        turn = self._next[story.episode_id]
        for asked in story.turns[max(0, turn - 2) : turn]:
            if asked.action is not None and asked.observation.turn < turn - 1:
                yield f"after the action of turn {asked.action.turn}: {asked.action.text[:200]!r}"

    async def _answer(self, story: Story, observation: Observation, group: anyio.abc.TaskGroup) -> None:
        asked = story.turns[observation.turn]
        if asked.action is None or asked.action_entry is None or _is_last_recorded(story, asked):
            self._close(story)
            self._report.skipped["episodes to their end, which was not recorded"] += 1
            await self._cancel(story.episode_id)
            return
        action = msgspec.structs.replace(asked.action, attempt=observation.attempt, hop=observation.hop)
        if self._pace.is_free:
            await self._act(observation, action, asked.action_entry)
        else:
            group.start_soon(self._act, observation, action, asked.action_entry)

    async def _act(self, observation: Observation, action: Action, recorded: StreamEntry) -> None:
        await self._pace.wait(recorded)
        subject = self._stage.subjects.action(observation.environment_lane, observation.episode_id)
        self._stage.feed(subject, action, recorded)

    def _close(self, story: Story) -> None:
        """Nothing more of it is compared."""
        del self._open[story.episode_id]
        self._progress.advance()

    async def _cancel(self, episode_id: str) -> None:
        """Free the slot: the worker is told to end the episode."""
        subject = self._stage.subjects.control("environment", WORKER)
        wanted = ControlRequested(command="cancel", episodes=(episode_id,))
        await self._stage.bus.request(subject, encode(wanted), timeout=self._patience_seconds)

    def _give_up(self) -> None:
        """Nothing came for too long: each open episode is a difference of its own."""
        for episode_id in self._open:
            story, turn = self._stories[episode_id], self._next[episode_id]
            what = f"Observation of turn {turn}" if turn < len(story.turns) else "EpisodeFinished"
            silence = f"nothing within {self._patience_seconds:g} s"
            self._report.differences.append(self._different(story, what, "type", what.split(" ")[0], silence))


def _is_last_recorded(story: Story, asked: Asked) -> bool:
    """True for a turn whose outcome nobody recorded: the run, or its recording, ended before."""
    return story.result is None and asked is story.turns[-1]


def _pool(story: Story) -> str:
    assert story.request_entry is not None
    return story.request_entry.subject.split(".")[3]
