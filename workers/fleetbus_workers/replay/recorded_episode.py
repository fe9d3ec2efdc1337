"""One episode of a recording: its request, the turns of its final history, its result. Decoded when first asked for. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.history import Turn, fold_history
from fleetbus.log.episodes import decode_entries, decode_episode_entry
from fleetbus.logs.secret_formats import REDACTED
from fleetbus_schemas import Action, AttemptStarted, EpisodeFinished, EpisodeRequested, Observation

_REDACTED = REDACTED.encode()
_KINDS = frozenset({"task", "obs", "act", "episode"})


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An Observation, and the Action that answered it, if one did."""

    observation: Observation
    observation_entry: StreamEntry
    action: Action | None = None
    action_entry: StreamEntry | None = None


class RecordedEpisode:
    """The entries of one episode by kind of subject, and what they say."""

    def __init__(self, episode_id: str) -> None:
        self.episode_id = episode_id
        self.entries: defaultdict[str, list[StreamEntry]] = defaultdict(list)

    @cached_property
    def request_entry(self) -> StreamEntry | None:
        return self._request[0] if self._request else None

    @cached_property
    def request(self) -> EpisodeRequested | None:
        return self._request[1] if self._request else None

    @cached_property
    def _request(self) -> tuple[StreamEntry, EpisodeRequested] | None:
        return next(iter(decode_entries(EpisodeRequested, self.entries["task"])), None)

    @cached_property
    def claims(self) -> list[AttemptStarted]:
        return [each for _, each in self._outcomes if isinstance(each, AttemptStarted)]

    @cached_property
    def result(self) -> EpisodeFinished | None:
        return next((each for _, each in self._outcomes if isinstance(each, EpisodeFinished)), None)

    @cached_property
    def result_entry(self) -> StreamEntry | None:
        return next((entry for entry, each in self._outcomes if isinstance(each, EpisodeFinished)), None)

    @cached_property
    def _outcomes(self) -> list[tuple[StreamEntry, object]]:
        return [(entry, decode_episode_entry(entry)) for entry in self.entries["episode"]]

    @property
    def result_actions(self) -> Iterator[StreamEntry]:
        """The Actions that the result refers to, in order."""
        actions = {entry.sequence: entry for entry in self.entries["act"]}
        for reference in self.result.actions if self.result is not None else ():
            if (entry := actions.get(reference.sequence)) is not None:
                yield entry

    @cached_property
    def turns(self) -> tuple[RecordedTurn, ...]:
        """The turns of the final history in order, as far as their Observations were recorded; the last may lack tokens."""
        return tuple(self._read_turns())

    def _read_turns(self) -> Iterator[RecordedTurn]:
        observations: dict[tuple[int, int], tuple[StreamEntry, Observation]] = {}
        for entry, observation in decode_entries(Observation, self.entries["obs"]):
            observations.setdefault((observation.attempt, observation.turn), (entry, observation))
        actions = decode_entries(Action, self.entries["act"])
        entries = {entry.sequence: entry for entry, _ in actions}
        found = [Turn(sequence=entry.sequence, lane=entry.subject.split(".")[3], action=action) for entry, action in actions]
        history = [(entries[turn.sequence], turn.action) for turn in fold_history(self.claims, found)]
        newest = (self.claims[-1].attempt if self.claims else 1, len(history))
        without_tokens = [each for each in actions if (each[1].attempt, each[1].turn) == newest][:1]
        for action_entry, action in history + without_tokens:
            observed = observations.get((action.attempt, action.turn))
            if observed is None:
                return
            yield RecordedTurn(observation=observed[1], observation_entry=observed[0], action=action, action_entry=action_entry)
        if newest in observations and not without_tokens:
            entry, observation = observations[newest]
            yield RecordedTurn(observation=observation, observation_entry=entry)

    @property
    def is_redacted(self) -> bool:
        """True if the recorder removed something that a worker reads."""
        entries = [self.request_entry, *(entry for turn in self.turns for entry in (turn.observation_entry, turn.action_entry))]
        if not any(_REDACTED in entry.payload for entry in entries if entry is not None):
            return False
        texts: list[object] = [self.request, *(turn.observation.messages for turn in self.turns)]
        texts += [each for turn in self.turns if turn.action for each in (turn.action.text, turn.action.tool_calls)]
        return REDACTED in repr(texts)


def read_episodes(entries: Iterable[StreamEntry]) -> dict[str, RecordedEpisode]:
    """All episodes of a recording by id, in order of their first entry."""
    found: dict[str, RecordedEpisode] = {}
    for entry in entries:
        kind, episode_id = entry.subject.split(".", 3)[2], entry.subject.rpartition(".")[2]
        if kind in _KINDS:
            episode = found.get(episode_id)
            if episode is None:
                episode = found[episode_id] = RecordedEpisode(episode_id)
            episode.entries[kind].append(entry)
    return found
