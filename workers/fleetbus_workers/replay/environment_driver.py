"""Replay of the environment role: recorded requests and Actions played on fresh environments of a real worker.

Each recorded episode is played in one attempt along its final history. What has no cause in environment or policy (a worker
that died, an expired deadline, a cancellation) cannot be replayed and is left out, with its outcome as the reason.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.delivery.cancel import ASKED_BY
from fleetbus_schemas import Action, ControlRequested, EpisodeFinished, Message, Observation, encode
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.replay.compare import Found
from fleetbus_workers.replay.deduplicate import remove_duplicates
from fleetbus_workers.replay.driver import Compared, Driver, ReplayContext
from fleetbus_workers.replay.recorded_episode import RecordedEpisode, read_episodes
from fleetbus_workers.replay.recorded_judge import is_without_score, take_recorded_score
from fleetbus_workers.replay.replay_environment import WORKER, ReplayEnvironment, open_replay_environment, translate_positions
from fleetbus_workers.replay.report import Report

OUTSIDE_CAUSES = frozenset({"timeout", "lost", "cancelled", "stale"})
"""Outcomes that neither environment nor policy decided."""


async def replay_environment(context: ReplayContext, make: Callable[[], Environment]) -> None:
    """Play every episode again and compare each Observation and result. ``make`` makes one environment per episode."""
    episodes: Iterable[RecordedEpisode] = select_playable(read_episodes(context.recording.entries).values(), context.report)
    if context.options.distinct:
        episodes = remove_duplicates(episodes, context.report)
    played = {episode.episode_id: episode for episode in episodes}
    context.progress.expect(len(played))
    if not played:
        return
    pools = tuple({each.request_entry.subject.split(".")[3] for each in played.values() if each.request_entry})
    policies = tuple({policy for each in played.values() if each.request for policy in each.request.policies})
    settings = msgspec.structs.replace(context.configuration.environment, pools=",".join(pools))
    configuration = msgspec.structs.replace(context.configuration, environment=settings)

    async def work(bus: Bus, drain: anyio.Event) -> None:
        await run_environment(bus, configuration=configuration, name=WORKER, drain=drain, make=make)

    async with open_replay_environment(context.recording, configuration, pools=pools, policies=policies) as environment:
        await EnvironmentDriver(context, environment, played).run(work)


def select_playable(episodes: Iterable[RecordedEpisode], report: Report) -> Iterator[RecordedEpisode]:
    """The episodes that can be replayed; ``report`` counts the others by reason."""
    for episode in episodes:
        if episode.request is None:
            report.skipped["episodes without a request in the recording"] += 1
        elif episode.result is not None and episode.result.outcome in OUTSIDE_CAUSES:
            report.skipped[f"episodes with outcome {episode.result.outcome}"] += 1
        elif episode.result is not None and is_without_score(episode.result):
            report.skipped["episodes without the judge's score"] += 1
        elif not episode.turns:
            report.skipped["episodes without a recorded turn"] += 1
        elif episode.is_redacted:
            report.skipped["episodes of which something was redacted"] += 1
        else:
            yield episode


class EnvironmentDriver(Driver):
    """Plays all episodes at once; one that differs is cancelled and goes no further."""

    kinds = ("obs", "episode")
    types = (Observation, EpisodeFinished)

    def __init__(self, context: ReplayContext, environment: ReplayEnvironment, episodes: dict[str, RecordedEpisode]) -> None:
        super().__init__(context, environment)
        self._open = dict(episodes)
        self._next_turn = dict.fromkeys(episodes, 0)

    async def drive(self) -> None:
        for episode in self._open.values():
            assert episode.request is not None and episode.request_entry is not None
            self.store(episode.request_entry.subject, episode.request, episode.request_entry)
        while self._open:
            received = await self.receive()
            if received is None:
                self._note_silence()
                return
            episode_id = received[0].subject.rpartition(".")[2]
            if episode_id in self._open:
                await self._check(self._open[episode_id], *received)

    async def _check(self, episode: RecordedEpisode, entry: StreamEntry, message: Message) -> None:
        turn = self._next_turn[episode.episode_id]
        if isinstance(message, Observation):
            if message.turn < turn:
                return  # published twice
            if self._check_observation(episode, turn, entry, message):
                await self._answer(episode, message)
            else:
                self._close(episode)
                await self._cancel(episode)
        elif isinstance(message, EpisodeFinished):
            self._check_result(episode, turn, entry, message)
            self._close(episode)

    def _check_observation(self, episode: RecordedEpisode, turn: int, entry: StreamEntry, observation: Observation) -> bool:
        if turn >= len(episode.turns) or observation.turn != turn:
            recorded = f"{episode.result.outcome} after {len(episode.turns)} turns" if episode.result else "(nothing)"
            self._note_difference(episode, "EpisodeFinished", recorded, f"Observation of turn {observation.turn}")
            return False
        self._next_turn[episode.episode_id] = turn + 1
        position = self.environment.recorded_positions.get(observation.request_sequence, 0)
        observation = msgspec.structs.replace(observation, request_sequence=position)
        recorded_turn = episode.turns[turn]
        if recorded_turn.observation.ahead or observation.ahead:  # what turns before it would add was not known exactly
            observation = msgspec.structs.replace(observation, tokens_left=recorded_turn.observation.tokens_left)
        name = f"Observation of turn {turn}"
        compared = self._describe_compared(episode, name, recorded_turn.observation_entry)
        return self.compare(recorded_turn.observation, observation, compared, entry.subject)

    def _check_result(self, episode: RecordedEpisode, turn: int, entry: StreamEntry, result: EpisodeFinished) -> None:
        if turn < len(episode.turns):
            shown = f"EpisodeFinished {result.outcome} {result.error_class} {result.error}".strip()
            self._note_difference(episode, f"Observation of turn {turn}", "Observation", shown)
        elif episode.result is not None and episode.result_entry is not None:  # else the recording ends before the episode
            translated = translate_positions(result, self.environment.recorded_positions)
            translated = take_recorded_score(episode.result, translated, self.context.configuration.reward.weights)
            compared = self._describe_compared(episode, "EpisodeFinished", episode.result_entry)
            self.compare(episode.result, translated, compared, entry.subject)

    def _note_difference(self, episode: RecordedEpisode, name: str, recorded: str, replayed: str) -> None:
        """A message of another type than the recorded one, or none."""
        entry = episode.result_entry or episode.turns[-1].observation_entry
        self.note_difference(Found("type", recorded, replayed), self._describe_compared(episode, name, entry))

    def _describe_compared(self, episode: RecordedEpisode, name: str, entry: StreamEntry) -> Compared:
        name = f"{name} of episode {episode.episode_id}"
        return Compared(name, entry.sequence, episode.episode_id, partial(self._describe, episode))

    def _describe(self, episode: RecordedEpisode) -> tuple[str, ...]:
        assert episode.request is not None
        turn = self._next_turn[episode.episode_id]
        actions = [each.action for each in episode.turns[max(0, turn - 2) : max(0, turn - 1)]]
        said = [f"after the action of turn {each.turn}: {each.text[:200]!r}" for each in actions if each is not None]
        return (f"task {episode.request.task.key}", *said)

    async def _answer(self, episode: RecordedEpisode, observation: Observation) -> None:
        turn = episode.turns[observation.turn]
        has_outcome = episode.result is not None or turn is not episode.turns[-1]
        if turn.action is None or turn.action_entry is None or not has_outcome:  # the run, or its recording, ended here
            self._close(episode)
            self.report.skipped["episodes to their end, which was not recorded"] += 1
            await self._cancel(episode)
            return
        action: Action = msgspec.structs.replace(turn.action, attempt=observation.attempt, hop=observation.hop)
        subject = self.environment.subjects.action(observation.environment_lane, observation.episode_id)
        self.store(subject, action, turn.action_entry)

    def _close(self, episode: RecordedEpisode) -> None:
        """Compare nothing more of this episode."""
        del self._open[episode.episode_id]
        self.context.progress.advance()

    async def _cancel(self, episode: RecordedEpisode) -> None:
        """Make the worker end the episode, so that its slot is free."""
        subject = self.environment.subjects.control("environment", WORKER, "cancel")
        author = episode.result.error.removeprefix(ASKED_BY) if episode.result is not None else ""
        payload = encode(ControlRequested(command="cancel", episodes=(episode.episode_id,), author=author))
        await self.environment.bus.request(subject, payload, timeout=self.options.patience_seconds)

    def _note_silence(self) -> None:
        """The worker published nothing for too long: each open episode is a difference of its own."""
        for episode in self._open.values():
            turn = self._next_turn[episode.episode_id]
            name = f"Observation of turn {turn}" if turn < len(episode.turns) else "EpisodeFinished"
            self._note_difference(episode, name, name.split(" ")[0], self.silence)
