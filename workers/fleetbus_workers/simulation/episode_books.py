"""Books of all episodes, kept from the log alone: each entry is checked when it is stored, against everything before it.

The invariants of delivery rules 1 to 4 and 9. What only the simulation knows (disturbances, what an environment really did) is
asked of `Excuses` above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
import msgspec

from fleetbus.bus.base import Stored
from fleetbus.core.history import Turn, fold_history, history_hash, history_ids, loss_mask
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    Observation,
    decode,
)
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.stored import STORED
from fleetbus_schemas.tokens import extend_history, pack_ids, pack_mask, unpack_ids
from fleetbus_workers.inference.answers import turn_seed
from fleetbus_workers.simulation.engines import sampled_ids
from fleetbus_workers.simulation.watch import Watch

Claim = tuple[float, AttemptStarted]
"""A claim and the second at which it was stored."""


class EpisodePages(msgspec.Struct, kw_only=True):
    """Everything that the log says about one episode."""

    request: EpisodeRequested
    request_sequence: int
    requested_at: float
    claims: list[Claim] = msgspec.field(default_factory=list)
    released: bool = False
    releases: int = 0
    observations: dict[tuple[int, int], Observation] = msgspec.field(default_factory=dict)
    observed_at: dict[tuple[int, int], float] = msgspec.field(default_factory=dict)
    turns: dict[tuple[int, int], Turn] = msgspec.field(default_factory=dict)
    last_actions: dict[str, int] = msgspec.field(default_factory=dict)
    result: EpisodeFinished | None = None
    result_sequence: int = 0

    def history(self, attempt: int) -> tuple[Turn, ...]:
        """The token history that this attempt stands on, by everything stored so far."""
        return fold_history([claim for _, claim in self.claims[:attempt]], self.turns.values())


class Excuses(Protocol):
    """Judges what the log alone cannot: reports what has no excuse."""

    def claimed(self, pages: EpisodePages, claim: AttemptStarted) -> None: ...
    def finished(self, pages: EpisodePages, result: EpisodeFinished, at: float) -> None: ...


class EpisodeBooks:
    """Pages by episode id. ``is_trimmed``: a recorder removes observations and actions of settled episodes."""

    def __init__(self, watch: Watch, excuses: Excuses) -> None:
        self._watch = watch
        self._excuses = excuses
        self.pages: dict[str, EpisodePages] = {}
        self.open: dict[str, EpisodePages] = {}
        self._one_finished = anyio.Event()
        self.is_trimmed = False

    async def all_finished(self) -> None:
        """Return once every request has its result."""
        while self.open:
            self._one_finished = anyio.Event()
            await self._one_finished.wait()

    def requested(self, entry: Stored, at: float) -> EpisodePages | None:
        request = decode(EpisodeRequested, entry.payload, subject=entry.subject)
        if request.episode_id in self.pages:
            self._watch.violate("a request is stored once", request.episode_id)
            return None
        pages = EpisodePages(request=request, request_sequence=entry.sequence, requested_at=at)
        self.pages[request.episode_id] = self.open[request.episode_id] = pages
        return pages

    def on_episode(self, entry: Stored, at: float) -> None:
        """An entry of ``episode.<episode>``."""
        message = decode_any(STORED["episode"], entry.payload, subject=entry.subject)
        assert isinstance(message, (AttemptStarted, AttemptReleased, EpisodeFinished))
        pages = self.pages.get(message.episode_id)
        if pages is None:
            self._watch.violate("only requested episodes are played", message.episode_id)
        elif pages.result is not None:
            self._watch.violate("one result per episode, and nothing after it", f"{message.episode_id}: {message}")
        elif isinstance(message, AttemptStarted):
            self._claimed(pages, message, at)
        elif isinstance(message, AttemptReleased):
            self._released(pages, message)
        else:
            pages.result, pages.result_sequence = message, entry.sequence
            self.open.pop(message.episode_id, None)
            self._one_finished.set()
            self._finished(pages, message, at)

    def observed(self, entry: Stored, at: float) -> None:
        observation = decode(Observation, entry.payload, subject=entry.subject)
        pages = self.pages.get(observation.episode_id)
        if pages is None or not 0 < observation.attempt <= len(pages.claims):
            self._watch.violate("observations follow a claim", f"{observation.episode_id} attempt {observation.attempt}")
            return
        key = (observation.attempt, observation.turn)
        first = pages.observations.setdefault(key, observation)
        pages.observed_at.setdefault(key, at)
        same = (first.messages, first.history_hash) == (observation.messages, observation.history_hash)
        self._watch.require(same, "a rerouted observation is the same", f"{observation.episode_id} {key}")

    def acted(self, entry: Stored) -> None:
        action = decode(Action, entry.payload, subject=entry.subject)
        pages = self.pages.get(action.episode_id)
        key = (action.attempt, action.turn)
        name = f"{action.episode_id} attempt {action.attempt} turn {action.turn}"
        if pages is None or key not in pages.observations:
            self._watch.violate("no action for a turn never observed", name)
        elif key in pages.turns:
            is_trimmed = pages.result is not None and self.is_trimmed  # then the subject may be empty again
            self._watch.require(is_trimmed, "one action per turn", name)
        else:
            if action.finish_reason != "failed" and action.sampled:
                self._check_tokens(pages, pages.observations[key], action, name)
            lane = entry.subject.split(".")[3]
            pages.turns[key] = Turn(sequence=entry.sequence, lane=lane, action=action)
            pages.last_actions[lane] = entry.sequence

    def _claimed(self, pages: EpisodePages, claim: AttemptStarted, at: float) -> None:
        require, name = self._watch.require, f"{claim.episode_id} attempt {claim.attempt} of {claim.worker}"
        require(claim.attempt == len(pages.claims) + 1, "attempts are numbered without gaps", name)
        require(claim.request_sequence == pages.request_sequence, "a claim names its request", name)
        require(claim.nonce not in {each.nonce for _, each in pages.claims}, "a claim is stored once", name)
        expected = "fresh" if not pages.claims else "handed_back" if pages.released else "taken_over"
        require(claim.reason == expected, "a claim tells why", f"{name}: {claim.reason} instead of {expected}")
        self._excuses.claimed(pages, claim)
        pages.claims.append((at, claim))
        pages.released = False
        recorded = len(pages.history(len(pages.claims) - 1))
        require(claim.resumed_at_turn <= recorded, "an attempt resumes where the log ends", f"{name}: {claim.resumed_at_turn}")

    def _released(self, pages: EpisodePages, goodbye: AttemptReleased) -> None:
        right = goodbye.attempt == len(pages.claims) and not pages.released
        self._watch.require(right, "only the newest claim is released, once", f"{goodbye.episode_id} {goodbye.attempt}")
        pages.released = True
        pages.releases += 1

    def _finished(self, pages: EpisodePages, result: EpisodeFinished, at: float) -> None:
        require, name = self._watch.require, f"{result.episode_id}: {result.outcome} of attempt {result.attempt}"
        require(result.attempt == len(pages.claims), "only the newest attempt finishes", f"{name}, {len(pages.claims)} claims")
        require(result.request_sequence == pages.request_sequence, "a result names its request", name)
        require((result.reward is not None) == (result.outcome in GRADED), "a reward if and only if graded", name)
        history = pages.history(result.attempt)[: result.turns]
        if result.turns:
            self._check_history(result, history, name)
        self._excuses.finished(pages, result, at)

    def _check_history(self, result: EpisodeFinished, history: Sequence[Turn], name: str) -> None:
        """The result refers to the folded history, mask and versions included."""
        mask = loss_mask(history)
        versions = {span.version for turn in history for span in turn.action.versions}
        holds = (
            tuple(turn.reference for turn in history) == result.actions
            and (len(mask), pack_mask(mask)) == (result.tokens, result.loss_mask)
            and tuple(sorted(versions)) == result.policy_versions
        )
        self._watch.require(holds, "a result refers to the history of its claims", f"{name}, {len(history)} turns")

    def _check_tokens(self, pages: EpisodePages, observation: Observation, action: Action, name: str) -> None:
        """Prompt, sampled tokens and hash are what the history before, as the log has it, leads to."""
        before = pages.history(action.attempt)[: action.turn]
        if len(before) != action.turn:
            self._watch.violate("an action stands on all turns before it", f"{name}: {len(before)} turns in the log")
            return
        delta = [byte for message in observation.messages for byte in str(message.content).encode()]
        sampled = sampled_ids(history_ids(before) + delta, action.versions, turn_seed(observation))
        digest = extend_history(history_hash(before), pack_ids(delta), pack_ids(sampled))
        require = self._watch.require
        require(unpack_ids(action.prompt_delta) == delta, "the prompt is what was observed", name)
        require(unpack_ids(action.sampled) == sampled, "tokens are sampled upon the recorded history", name)
        require(action.history_hash == digest, "an action carries the hash of its history", name)
