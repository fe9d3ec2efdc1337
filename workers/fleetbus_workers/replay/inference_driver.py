"""Replay of the inference role: recorded Observations against a real worker with the recorded versions of the weights.

Version after version, turn after turn: each Action that one version sampled alone is asked for again and compared, token ids
exactly, log-probabilities within a tolerance. Before a turn that is asked for, Actions that cannot be sampled again are stored
as they were recorded, so that the log holds the same history.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio
import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.episodes import decode_entries
from fleetbus.logs.secret_formats import REDACTED
from fleetbus.recording.redaction import is_wiped
from fleetbus_schemas import ANY_LANE, Action, AttemptStarted, LineageStarted, PolicyPublished
from fleetbus_workers.inference.base import ImageSource, Sampler, Template
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.replay.compare import Found
from fleetbus_workers.replay.driver import Compared, Driver, ReplayContext
from fleetbus_workers.replay.recorded_episode import RecordedEpisode, RecordedTurn, read_episodes
from fleetbus_workers.replay.replay_environment import WORKER, ReplayEnvironment, open_replay_environment
from fleetbus_workers.replay.report import UNLOADED
from fleetbus_workers.replay.token_histories import ExpectedTurn, find_expected_turns
from fleetbus_workers.replay.watched_sampler import WatchedSampler
from fleetbus_workers.weights.manifests import inline_manifest

LANE = "e0"
"""The environment lane of the replayed episodes."""


async def replay_inference(
    context: ReplayContext,
    sampler: Sampler,
    template: Template,
    *,
    weights: dict[str, Path] | None = None,
    images: Callable[[Bus], ImageSource | None] = lambda _: None,
) -> None:
    """Answer every Observation again and compare the Actions. ``weights`` are files by their recorded name, for versions whose
    recorded URI does not exist any more or is not read, as the recording is not trusted; versions without weights are skipped.
    ``images`` reads the recorded objects for a model with vision. Raises `UserError` when the recording has no version."""
    watched = sampler if isinstance(sampler, WatchedSampler) else WatchedSampler(sampler)

    async def work(bus: Bus, drain: anyio.Event) -> None:
        await run_inference(
            bus,
            configuration=context.configuration,
            name=WORKER,
            drain=drain,
            sampler=watched,
            template=template,
            images=images(bus),
        )

    async with open_replay_environment(context.recording, context.configuration) as environment:
        await InferenceDriver(context, environment, watched, weights or {}).run(work)


class InferenceDriver(Driver):
    """Asks for as many turns at once as the worker has slots for the shared lane, one turn of an episode at a time."""

    kinds = ("act",)
    types = (Action,)

    def __init__(
        self, context: ReplayContext, environment: ReplayEnvironment, sampler: WatchedSampler, weights: dict[str, Path]
    ) -> None:
        super().__init__(context, environment)
        self._sampler = sampler
        self._weights = weights
        self._policy = context.configuration.run.policy
        self._episodes = list(read_episodes(context.recording.entries).values())
        self._next_turn = dict.fromkeys((each.episode_id for each in self._episodes), 0)
        self._stored_turns: dict[str, int] = {}
        """By episode how many of its turns are in the log."""
        self._due = defaultdict(list, {0: list(range(len(self._episodes)))})
        """Numbers of episodes by the version that their next turn needs."""
        self._asked: dict[tuple[str, int], int] = {}
        """Numbers of the episodes that wait for the Action of a turn."""
        self._unloadable = ""
        slots = context.configuration.inference.slots
        self._places = slots - slots // 2

    async def drive(self) -> None:
        versions = list(self._read_versions())
        if not versions:
            raise UserError("the recording contains no published version of the policy, so nothing can be sampled")
        turns = sum(len(episode.turns) for episode in self._episodes)
        self.context.progress.expect(turns)
        for entry, published in versions:
            if await self._load(entry, published, len(versions)):
                await self._replay_version(published.version)
        if left := turns - sum(self._next_turn.values()):
            self.report.skipped["actions whose version is not at hand, or after one that differs"] += left

    def _read_versions(self) -> Iterator[tuple[StreamEntry, PolicyPublished]]:
        subject = self.environment.subjects.policy(self._policy)
        entries = (entry for entry in self.context.recording.entries if entry.subject == subject)
        yield from decode_entries(PolicyPublished, entries, beside=(LineageStarted,))

    async def _load(self, entry: StreamEntry, published: PolicyPublished, versions: int) -> bool:
        await self.context.wait_until_due(entry)
        published = inline_manifest(published, self.environment.objects)
        name = published.uri.rpartition("/")[2]
        if name in self._weights:
            published = msgspec.structs.replace(published, uri=self._weights[name].absolute().as_uri())
        elif not self.options.trusted:
            published = msgspec.structs.replace(published, uri=f"file:///not-recorded/{name}")
        self._sampler.expect(published.version)
        self.environment.store(entry.subject, published, entry)
        if published.version <= self._sampler.version and any(self._next_turn.values()):
            return False
        with anyio.fail_after(self.options.patience_seconds):
            await self._sampler.wait_until_settled()
        if not self._sampler.rejected:
            return True
        path = Path(unquote(urlsplit(published.uri).path))
        if not await anyio.Path(path).is_file():
            self.report.advice = (
                f"to compare all of them: fleetbus up --learner-keep-weights {max(versions, 2)} (or more), "
                "then fleetbus record RUN --weights"
            )
        reason = self._sampler.rejected.removesuffix(f": {path}").removesuffix(f": '{path}'")  # it begins with the path, too
        self._unloadable = self._unloadable or f"{UNLOADED} (the first: {reason})"
        self.report.skipped[self._unloadable] += 1
        return False

    async def _replay_version(self, version: int) -> None:
        """All turns of this version whose earlier turns are in the log."""
        due = deque(sorted(number for needed in list(self._due) if needed <= version for number in self._due.pop(needed)))
        await self._sampler.prepare(each for number in due for each in self._read_expected(self._episodes[number], version))
        while due or self._asked:
            while due and len(self._asked) < self._places:
                self._ask_next(due.popleft(), version)
            received = await self.receive() if self._asked else None
            if received is not None:
                action = received[1]
                assert isinstance(action, Action)
                number = self._asked.pop((action.episode_id, action.turn), None) if action.worker == WORKER else None
                if number is not None and self._check(self._episodes[number], action, received[0].subject):
                    due.appendleft(number)
            else:
                for number in self._asked.values():
                    self._note_silence(self._episodes[number])
                self._asked.clear()

    def _read_expected(self, episode: RecordedEpisode, version: int) -> Iterator[ExpectedTurn]:
        """Turns that this version will be asked for, from the episode's next turn on."""
        for turn, expected in find_expected_turns(episode.turns):
            if (
                get_newest_version(turn) == version
                and turn.observation.turn >= self._next_turn[episode.episode_id]
                and not self._reason_to_skip(episode, turn)
            ):
                yield expected

    def _ask_next(self, number: int, version: int) -> None:
        """Ask for the next turn that this version sampled; an episode whose next turn needs a later version waits for it."""
        episode = self._episodes[number]
        for index in range(self._next_turn[episode.episode_id], len(episode.turns)):
            turn = episode.turns[index]
            needed = get_newest_version(turn) if turn.observation.policy == self._policy else 0
            if needed > version:
                self._due[needed].append(number)
                return
            self.context.progress.advance()
            reason = self._reason_to_skip(episode, turn)
            if not reason and needed < version:
                reason = "actions whose version is not at hand"
            if not reason:
                self._store_turns_before(episode, index)
                self._asked[episode.episode_id, turn.observation.turn] = number
                self._ask(turn)
                return
            self.report.skipped[reason] += 1
            self._next_turn[episode.episode_id] = index + 1

    def _store_turns_before(self, episode: RecordedEpisode, turn: int) -> None:
        """Store the recorded Actions that the log lacks, below one attempt that stands for all that were."""
        if episode.episode_id not in self._stored_turns:
            first = msgspec.structs.replace(episode.turns[0].observation_entry, sequence=0)
            claim = AttemptStarted(episode_id=episode.episode_id, attempt=1, worker="recorded", nonce="recorded", lane=LANE)
            self.environment.store(self.environment.subjects.episode(episode.episode_id), claim, first)
        for each in episode.turns[self._stored_turns.get(episode.episode_id, 0) : turn]:
            if each.action is not None and each.action_entry is not None:
                action = msgspec.structs.replace(each.action, attempt=1)
                subject = self.environment.subjects.action(LANE, episode.episode_id)
                self.environment.store(subject, action, each.action_entry)
        self._stored_turns[episode.episode_id] = turn + 1

    def _ask(self, turn: RecordedTurn) -> None:
        observation, subjects = turn.observation, self.environment.subjects
        observation = msgspec.structs.replace(
            observation,
            attempt=1,
            hop=0,
            environment_lane=LANE,
            action_sequence=self.environment.last_sequence_on(subjects.action(LANE, observation.episode_id)),
            request_sequence=0,
            pinned_version=None,
            ahead=0,
        )
        subject = subjects.observation(observation.policy, ANY_LANE, observation.episode_id)
        self.store(subject, observation, turn.observation_entry)

    def _check(self, episode: RecordedEpisode, action: Action, subject: str) -> bool:
        """Compare the answer to the episode's next turn; True if the episode continues."""
        turn = episode.turns[self._next_turn[episode.episode_id]]
        assert turn.action is not None
        replayed = msgspec.structs.replace(action, attempt=turn.action.attempt)
        same = self.compare(turn.action, replayed, self._describe_compared(episode), subject)
        self._next_turn[episode.episode_id] += same
        return same

    def _note_silence(self, episode: RecordedEpisode) -> None:
        self.note_difference(Found("type", "Action", self.silence), self._describe_compared(episode))

    def _describe_compared(self, episode: RecordedEpisode) -> Compared:
        turn = episode.turns[self._next_turn[episode.episode_id]]
        assert turn.action is not None and turn.action_entry is not None
        name = f"Action of turn {turn.observation.turn} of episode {episode.episode_id}"
        return Compared(name, turn.action_entry.sequence, episode.episode_id, lambda: describe_turn(turn))

    def _reason_to_skip(self, episode: RecordedEpisode, turn: RecordedTurn) -> str:
        """The reason why a recorded Action cannot be expected again; empty if it can."""
        action = turn.action
        if turn.observation.policy != self._policy:
            return "actions of other policies"
        if action is None:
            return "observations without a recorded action"
        if action.finish_reason == "failed":
            return f"failed actions ({action.error_class})"
        if len(action.versions) > 1:
            return "actions that several versions sampled"
        ids = (action.prompt_delta, action.sampled)
        if any(is_wiped(each) for each in ids) or REDACTED in repr((turn.observation.messages, action.text)):
            return "actions of which something was redacted"
        shown = [each.action for each in episode.turns if each.observation.turn <= turn.observation.turn and each.action]
        if any(image.object not in self.environment.objects for action in shown for image in action.images):
            return "actions upon images that the recording does not hold"
        return ""


def describe_turn(turn: RecordedTurn) -> tuple[str, ...]:
    """Lines about how a recorded Action came to be."""
    assert turn.action is not None
    versions = ", ".join(str(span.version) for span in turn.action.versions)
    shown = [f"{message.role}: {str(message.content)[:200]!r}" for message in turn.observation.messages[-1:]]
    return (f"sampled by version {versions}", f"recorded text: {turn.action.text[:200]!r}", *shown)


def get_newest_version(turn: RecordedTurn) -> int:
    """The version of the turn's newest token; 0 for an Action without tokens."""
    return turn.action.versions[-1].version if turn.action is not None and turn.action.versions else 0
