"""Books of all episodes, kept from the log alone: each entry is checked when it is stored, against everything before it.

The invariants of rules 1 to 4 and 9 of docs/concepts/delivery.md. What only the simulation knows (disturbances,
what an environment really did) is asked of `EpisodeOracle` above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.concurrency.notifier import Notifier
from fleetbus.core.episode.claims import EpisodeEntry
from fleetbus.core.episode.history import Turn, fold_history, loss_mask
from fleetbus.core.episode.segments import collect_segment_ids, describe_segments, fold_segments, hash_segment
from fleetbus.core.training.floor import NO_FLOOR, refuses_delivery, refuses_request
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    FloorRaised,
    Observation,
    decode,
)
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history, pack_ids, pack_mask, start_history, unpack_ids
from fleetbus_workers.inference.turn_rules import compute_turn_seed
from tests.simulation.doubles.engines import compute_sampled_ids
from tests.simulation.observer import Observer
from tests.simulation.scenario.shape import OTHER_SEAT

Claim = tuple[float, AttemptStarted]
"""A claim and the second at which it was stored."""


class EpisodeRecord(msgspec.Struct, kw_only=True):
    """Everything that the log says about one episode."""

    request: EpisodeRequested
    request_sequence: int
    requested_at: float
    last_at: float = 0.0
    """When something was stored for it."""
    claims: list[Claim] = msgspec.field(default_factory=list)
    released: bool = False
    releases: int = 0
    observations: dict[tuple[int, int], Observation] = msgspec.field(default_factory=dict)
    observed_at: dict[tuple[int, int], float] = msgspec.field(default_factory=dict)
    turns: dict[tuple[int, int], Turn] = msgspec.field(default_factory=dict)
    last_actions: dict[str, int] = msgspec.field(default_factory=dict)
    result: EpisodeFinished | None = None
    result_sequence: int = 0
    refused: bool = False
    """The request came when the floor was above it."""

    def history(self, attempt: int) -> tuple[Turn, ...]:
        """The token history that this attempt stands on, by everything stored so far."""
        return fold_history([claim for _, claim in self.claims[:attempt]], self.turns.values())


class EpisodeOracle(Protocol):
    """Judges what the log alone cannot: reports what has no excuse."""

    def check_claim(self, record: EpisodeRecord, claim: AttemptStarted) -> None: ...
    def check_result(self, record: EpisodeRecord, result: EpisodeFinished, at: float) -> None: ...


class EpisodeChecker:
    """Pages by episode id. ``is_trimmed``: a recorder removes observations and actions of settled episodes."""

    def __init__(self, observer: Observer, oracle: EpisodeOracle) -> None:
        self._observer = observer
        self._oracle = oracle
        self.record: dict[str, EpisodeRecord] = {}
        self.open: dict[str, EpisodeRecord] = {}
        self._unrequested: dict[str, EpisodeFinished] = {}
        """Results without their requests, as a log has them that lost these: who asks again is told so at the deadline."""
        self._one_finished = Notifier()
        self.is_trimmed = False
        self.floor = NO_FLOOR

    def raise_floor(self, entry: StreamEntry) -> None:
        """From here on what is below it changes nothing, and nobody may act upon it."""
        raised = decode(FloorRaised, entry.payload, subject=entry.subject)
        rises = raised.sequence >= self.floor.sequence and all(
            raised.groups.get(policy, 0) >= number for policy, number in self.floor.groups.items()
        )
        self._observer.require(rises, "the floor never sinks", str(raised))
        self.floor = raised
        passed = [record.request.episode_id for record in self.open.values() if not record.refused and self.is_passed(record)]
        self._observer.require(not passed, "nothing open lies below the floor", ", ".join(passed[:4]))

    def is_passed(self, record: EpisodeRecord) -> bool:
        """True if the floor has passed it: it stays settled, whatever lineage is cut afterwards."""
        return refuses_delivery(self.floor, record.request, record.request_sequence)

    async def one_finished(self) -> None:
        """Until the next request has its result."""
        await self._one_finished.wait()

    def apply_request(self, entry: StreamEntry, at: float) -> EpisodeRecord | None:
        request = decode(EpisodeRequested, entry.payload, subject=entry.subject)
        refused = refuses_request(self.floor, request)
        if refused and request.episode_id in self.record:
            return None
        if request.episode_id in self.record:
            self._observer.violate("a request is stored once", request.episode_id)
            return None
        record = EpisodeRecord(request=request, request_sequence=entry.sequence, requested_at=at, refused=refused)
        self.record[request.episode_id] = record
        record.result = self._unrequested.get(request.episode_id)
        if record.result is None:
            self.open[request.episode_id] = record
        return record

    def on_episode(self, entry: StreamEntry, at: float) -> None:
        """An entry of ``episode.<episode>``."""
        message = decode_any(STORED["episode"], entry.payload, subject=entry.subject)
        assert isinstance(message, (AttemptStarted, AttemptReleased, EpisodeFinished))
        record = self.record.get(message.episode_id)
        if record is None:
            self._observer.violate("only requested episodes are played", message.episode_id)
            if isinstance(message, EpisodeFinished):
                self._unrequested[message.episode_id] = message
        elif self._is_refused(record, message):
            self._observer.trace("refused", message.episode_id)
        elif record.result is not None:
            self._observer.violate("one result per episode, and nothing after it", f"{message.episode_id}: {message}")
        elif isinstance(message, AttemptStarted):
            self._apply_claim(record, message, at)
        elif isinstance(message, AttemptReleased):
            self._apply_release(record, message)
        else:
            record.result, record.result_sequence = message, entry.sequence
            self.open.pop(message.episode_id, None)
            self._one_finished.notify()
            self._apply_result(record, message, at)

    def _is_refused(self, record: EpisodeRecord, message: EpisodeEntry) -> bool:
        """An entry on a subject that everything has left, or a claim on a request that came too late."""
        if isinstance(message, EpisodeFinished) and record.refused and record.result is None:
            return False  # its requester ends it
        return record.refused or record.request_sequence < self.floor.sequence

    def apply_observation(self, entry: StreamEntry, at: float) -> None:
        observation = decode(Observation, entry.payload, subject=entry.subject)
        record = self.record.get(observation.episode_id)
        if record is None or not 0 < observation.attempt <= len(record.claims):
            self._observer.violate("observations follow a claim", f"{observation.episode_id} attempt {observation.attempt}")
            return
        record.last_at = at
        key = (observation.attempt, observation.turn)
        first = record.observations.setdefault(key, observation)
        record.observed_at.setdefault(key, at)
        same = _stands_on(first) == _stands_on(observation)
        self._observer.require(same, "a rerouted observation is the same", f"{observation.episode_id} {key}")
        is_other = bool(record.request.seats) and observation.seat == OTHER_SEAT
        right = entry.subject.split(".")[3] == (record.request.seats[0].policy if is_other else record.request.policy)
        self._observer.require(right, "a turn is asked of the policy of its seat", f"{observation.episode_id} {key}")

    def apply_garbage(self, entry: StreamEntry) -> None:
        """What is no message changes one thing: what expects the last entry of its subject."""
        tokens = entry.subject.split(".")
        if tokens[2] == "act" and tokens[-1] in self.record:
            self.record[tokens[-1]].last_actions[tokens[3]] = entry.sequence

    def apply_action(self, entry: StreamEntry, at: float) -> None:
        action = decode(Action, entry.payload, subject=entry.subject)
        record = self.record.get(action.episode_id)
        key = (action.attempt, action.turn)
        name = f"{action.episode_id} attempt {action.attempt} turn {action.turn}"
        if record is None or key not in record.observations:
            self._observer.violate("no action for a turn never observed", name)
        elif key in record.turns:
            is_trimmed = record.result is not None and self.is_trimmed  # then the subject may be empty again
            self._observer.require(is_trimmed, "one action per turn", name)
        else:
            if action.finish_reason != "failed" and action.sampled:
                self._check_tokens(record, record.observations[key], action, name)
            lane = entry.subject.split(".")[3]
            record.last_at = at
            record.turns[key] = Turn(sequence=entry.sequence, lane=lane, action=action)
            record.last_actions[lane] = entry.sequence

    def _apply_claim(self, record: EpisodeRecord, claim: AttemptStarted, at: float) -> None:
        require, name = self._observer.require, f"{claim.episode_id} attempt {claim.attempt} of {claim.worker}"
        require(claim.attempt == len(record.claims) + 1, "attempts are numbered without gaps", name)
        require(claim.request_sequence == record.request_sequence, "a claim names its request", name)
        require(claim.nonce not in {each.nonce for _, each in record.claims}, "a claim is stored once", name)
        expected = "fresh" if not record.claims else "handed_back" if record.released else "taken_over"
        require(claim.reason == expected, "a claim tells why", f"{name}: {claim.reason} instead of {expected}")
        self._oracle.check_claim(record, claim)
        record.claims.append((at, claim))
        record.last_at = at
        record.released = False
        recorded = len(record.history(len(record.claims) - 1))
        require(claim.resumed_at_turn <= recorded, "an attempt resumes where the log ends", f"{name}: {claim.resumed_at_turn}")

    def _apply_release(self, record: EpisodeRecord, release: AttemptReleased) -> None:
        right = release.attempt == len(record.claims) and not record.released
        self._observer.require(right, "only the newest claim is released, once", f"{release.episode_id} {release.attempt}")
        record.released = True
        record.releases += 1

    def _apply_result(self, record: EpisodeRecord, result: EpisodeFinished, at: float) -> None:
        require, name = self._observer.require, f"{result.episode_id}: {result.outcome} of attempt {result.attempt}"
        require(
            result.attempt == len(record.claims), "only the newest attempt finishes", f"{name}, {len(record.claims)} claims"
        )
        require(result.request_sequence == record.request_sequence, "a result names its request", name)
        require((result.reward is not None) == (result.outcome in GRADED), "a reward if and only if graded", name)
        history = record.history(result.attempt)[: result.turns]
        if result.turns:
            self._check_history(record, result, history, name)
        self._oracle.check_result(record, result, at)

    def _check_history(self, record: EpisodeRecord, result: EpisodeFinished, history: Sequence[Turn], name: str) -> None:
        """The result refers to the folded history, mask and versions included."""
        unseated = {turn for seat in result.seats if seat.reward is None for turn in seat.turns}
        mask = loss_mask(history, unseated if result.outcome in GRADED else ())
        is_shared = bool(record.request.seats)
        others = {turn for seat in result.seats for turn in seat.turns if is_shared and seat.name == OTHER_SEAT}
        own = [turn for number, turn in enumerate(history) if number not in others]
        versions = {span.version for turn in own for span in turn.action.versions}
        holds = (
            tuple(turn.reference for turn in history) == result.actions
            and (len(mask), pack_mask(mask)) == (result.tokens, result.loss_mask)
            and tuple(sorted(versions)) == result.policy_versions
            and describe_segments(fold_segments(history)) == result.segments
            and all(seat.versions == _list_versions(seat, history) for seat in result.seats)
        )
        self._observer.require(holds, "a result refers to the history of its claims", f"{name}, {len(history)} turns")

    def _check_tokens(self, record: EpisodeRecord, observation: Observation, action: Action, name: str) -> None:
        """Prompt, sampled tokens and hash are what the history before, as the log has it, leads to."""
        before = record.history(action.attempt)[: action.turn]
        if len(before) != action.turn:
            self._observer.violate("an action stands on all turns before it", f"{name}: {len(before)} turns in the log")
            return
        require = self._observer.require
        pinned = record.request.pinned_version if observation.policy == record.request.policy else None
        require(
            pinned is None or {span.version for span in action.versions} == {pinned}, "a pinned episode has one version", name
        )
        same = (action.segment, action.origin) == (observation.segment, observation.origin)
        require(same, "an action is of its segment", name)
        kept, digest, delta = _build_start(before, observation)
        delta += [byte for message in observation.messages for byte in str(message.content).encode()]
        sampled = compute_sampled_ids(kept + delta, action.versions, compute_turn_seed(observation))
        digest = extend_history(digest, pack_ids(delta), pack_ids(sampled))
        require(unpack_ids(action.prompt_delta) == delta, "the prompt is what was observed", name)
        require(unpack_ids(action.sampled) == sampled, "tokens are sampled upon the recorded history", name)
        require(action.history_hash == digest, "an action carries the hash of its history", name)


def _list_versions(seat: EpisodeSeat, history: Sequence[Turn]) -> tuple[int, ...]:
    """Those of a seat that a policy of its own plays and trains."""
    spans = [span for turn in seat.turns for span in history[turn].action.versions] if seat.policy else []
    return tuple(sorted({span.version for span in spans}))


def _stands_on(observation: Observation) -> tuple[object, ...]:
    return observation.messages, observation.history_hash, observation.segment, observation.origin


def _build_start(before: Sequence[Turn], observation: Observation) -> tuple[list[int], bytes, list[int]]:
    """By hand and from the log: the ids that a turn's prompt follows, their hash, and the ids that it begins with."""
    segments, origin = fold_segments(before), observation.origin
    number = observation.segment if origin is None else origin.parent
    if not 0 <= number < len(segments):
        return [], EMPTY_HISTORY, []
    ids = collect_segment_ids(segments[number], before)
    if origin is None:
        return ids, hash_segment(segments[number], segments, before), []
    return ids[: origin.kept], start_history(pack_ids(ids[: origin.kept])), ids[len(ids) - origin.repeated :]
