"""The turns of one attempt that were sent before it was their turn, and the answers to them that came early. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fleetbus.core.episode.history import Turn
from fleetbus_schemas import Observation, SamplingSettings
from fleetbus_workers.environment.episode.segments import Placement
from fleetbus_workers.environment.episode.stages import EpisodeEnded

NO_SEQUENCE = 1 << 62
"""Expected before the Action of a turn that is sent ahead: a worker that does not know of such turns is refused it."""


class SentTurn(NamedTuple):
    """The question, its lane and worker, and the position in the log at which it stands (0: not known)."""

    observation: Observation
    lane: str
    worker: str
    sequence: int = 0


class SentAhead:
    """By turn, as long as nobody waits for it."""

    __slots__ = ("_early", "_sent")

    def __init__(self) -> None:
        self._sent: dict[int, SentTurn] = {}
        self._early: dict[int, Turn] = {}

    def __contains__(self, turn: int) -> bool:
        return turn in self._sent

    def note(self, sent: SentTurn) -> None:
        self._sent[sent.observation.turn] = sent

    def deliver(self, answer: Turn) -> None:
        """Keep an answer until its turn; the first counts, and none that nobody asked for."""
        if answer.action.turn in self._sent:
            self._early.setdefault(answer.action.turn, answer)

    def take(self, observation: Observation) -> tuple[SentTurn | None, Turn | None]:
        """A turn as it was sent, and the answer to it, as far as there are any: it is waited for from now on, as
        ``observation`` asks for it. Raises `EpisodeEnded` if that is something else."""
        sent, answer = self._sent.pop(observation.turn, None), self._early.pop(observation.turn, None)
        if sent is None:
            return None, None
        if _list_asked(sent.observation) != _list_asked(observation):
            raise EpisodeEnded("env_failed", "told_ahead", f"turn {observation.turn} shows something else than was told ahead")
        if Placement.of(sent.observation) != Placement.of(observation):  # it is sampled upon the other one, or was already
            raise EpisodeEnded("env_failed", "told_ahead", f"turn {observation.turn} is not in the context that was told ahead")
        return sent, answer


def _list_asked(observation: Observation) -> tuple[object, ...]:
    """The part of an observation that its environment says."""
    return observation.messages, observation.tools, observation.seat, observation.sampling


def place_ahead(
    observation: Observation, seat: str, sampling: SamplingSettings, tokens_left: int, *, ahead: int
) -> Observation:
    """An observation as it is sent so many turns ``ahead``, with a seat and limits of its own."""
    return msgspec.structs.replace(
        observation,
        seat=seat,
        sampling=sampling,
        tokens_left=tokens_left,
        action_sequence=NO_SEQUENCE,
        ahead=ahead,
    )
