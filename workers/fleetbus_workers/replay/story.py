"""A recording as a replay needs it: per episode the request, the turns that count, and the result. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.history import Turn, fold_history
from fleetbus.episodes import decode_entries, decode_episode_entry
from fleetbus.logs import REDACTED
from fleetbus_schemas import Action, AttemptStarted, EpisodeFinished, EpisodeRequested, Observation

_REDACTED = REDACTED.encode()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded turn: the Observation, and the Action that answered it, if one did."""

    observation: Observation
    observation_entry: StreamEntry
    action: Action | None = None
    action_entry: StreamEntry | None = None


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded episode. ``turns`` are those of its final history in order; the last may be one that got no tokens."""

    episode_id: str
    request: EpisodeRequested | None
    request_entry: StreamEntry | None
    claims: tuple[AttemptStarted, ...]
    turns: tuple[Asked, ...]
    result: EpisodeFinished | None
    result_entry: StreamEntry | None

    @property
    def redacted(self) -> bool:
        """True if something that a worker reads was taken out of it."""
        entries = [self.request_entry, *(entry for turn in self.turns for entry in (turn.observation_entry, turn.action_entry))]
        if not any(_REDACTED in entry.payload for entry in entries if entry is not None):
            return False
        texts: list[object] = [self.request, *(turn.observation.messages for turn in self.turns)]
        texts += [each for turn in self.turns if turn.action for each in (turn.action.text, turn.action.tool_calls)]
        return REDACTED in repr(texts)


def read_stories(entries: Iterable[StreamEntry]) -> dict[str, Story]:
    """All episodes of a recording, in order of their first entry."""
    found: dict[str, dict[str, list[StreamEntry]]] = {}
    for entry in entries:
        kind = entry.subject.split(".", 3)[2]
        if kind in ("task", "obs", "act", "episode"):
            found.setdefault(entry.subject.rpartition(".")[2], {}).setdefault(kind, []).append(entry)
    return {episode_id: _story(episode_id, kinds) for episode_id, kinds in found.items()}


def _story(episode_id: str, kinds: dict[str, list[StreamEntry]]) -> Story:
    about = kinds.get("episode", [])
    told = [(entry, decode_episode_entry(entry)) for entry in about]
    claims = [each for _, each in told if isinstance(each, AttemptStarted)]
    results = [(entry, each) for entry, each in told if isinstance(each, EpisodeFinished)]
    requests = decode_entries(EpisodeRequested, kinds.get("task", []))
    actions = decode_entries(Action, kinds.get("act", []))
    observations = decode_entries(Observation, kinds.get("obs", []))
    return Story(
        episode_id=episode_id,
        request=requests[0][1] if requests else None,
        request_entry=requests[0][0] if requests else None,
        claims=tuple(claims),
        turns=tuple(_turns(claims, observations, actions)),
        result=results[0][1] if results else None,
        result_entry=results[0][0] if results else None,
    )


def _turns(
    claims: list[AttemptStarted],
    observations: list[tuple[StreamEntry, Observation]],
    actions: list[tuple[StreamEntry, Action]],
) -> Iterable[Asked]:
    asked: dict[tuple[int, int], tuple[StreamEntry, Observation]] = {}
    for entry, observation in observations:
        asked.setdefault((observation.attempt, observation.turn), (entry, observation))
    entries = {entry.sequence: entry for entry, _ in actions}
    told = [Turn(sequence=entry.sequence, lane=entry.subject.split(".")[3], action=action) for entry, action in actions]
    history = fold_history(claims, told)
    for turn in history:
        seen = asked.get((turn.action.attempt, turn.action.turn))
        if seen is None:
            return  # the recording does not hold what was seen
        yield Asked(observation=seen[1], observation_entry=seen[0], action=turn.action, action_entry=entries[turn.sequence])
    newest = claims[-1].attempt if claims else 1
    last = asked.get((newest, len(history)))
    if last is not None:
        empty = [each for each in actions if (each[1].attempt, each[1].turn) == (newest, len(history))]
        yield Asked(
            observation=last[1],
            observation_entry=last[0],
            action=empty[0][1] if empty else None,
            action_entry=empty[0][0] if empty else None,
        )
