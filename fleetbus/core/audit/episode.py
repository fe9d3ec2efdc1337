"""The audit of one episode: its claims, observed turns, Actions and result, folded in log order. Pure.

Turns are kept until the result is checked; what stays after it is a few numbers, so that memory grows with episodes only.
"""

import math
import sys
from collections.abc import Callable, Container, Sequence

import msgspec

from fleetbus.core.audit.findings import Findings
from fleetbus.core.audit.seat_limits import fit_their_limits
from fleetbus.core.episode.claim_seals import opens
from fleetbus.core.episode.history import Turn, fold_history
from fleetbus.core.episode.result_checks import build_sampled_mask, find_shared_context
from fleetbus.core.episode.segments import SegmentError, SegmentTree, describe_segments
from fleetbus.core.training.groups import has_tokens
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus_schemas import (
    GRADED,
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    EpisodeSegment,
    Observation,
    Outcome,
    SeatLimit,
    SegmentOrigin,
    Split,
)
from fleetbus_schemas.seat import map_by_seat
from fleetbus_schemas.tokens import EMPTY_HISTORY, TOKEN_BYTES, count_tokens, extend_history, unpack_logprobs

MAX_TURNS = 1 << 16
"""Turn numbers beyond this are invalid."""

_WORD = 32
"""Turns per integer: one for all of an attempt might be too large to be encoded."""


class ActionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts kept of an Action: its token counts, its segment, the history hashes before (of its observation) and after it,
    the seat that was observed, and the kinds of findings that its result has if it names this Action."""

    prompt: int
    sampled: int
    before: bytes
    after: bytes
    segment: int
    origin: SegmentOrigin | None
    seat: str
    faults: tuple[str, ...]


class EpisodeAudit(msgspec.Struct, kw_only=True, array_like=True):
    """The facts known of one episode so far. ``observed`` has a bit per turn, by attempt and 32 turns; ``hashes`` are those of
    the histories that (attempt, turn) were observed upon; ``actions`` are by position. ``lineage`` asked for it (empty: no
    learner did), ``stray`` if that one had been replaced by then; ``passed`` if the floor had passed its group when a lineage
    began."""

    episode_id: str
    requested: int = 0
    split: Split = "train"
    policy: str = ""
    group_id: str = ""
    group_size: int = 0
    lineage: str = ""
    stray: bool = False
    passed: bool = False
    attempts: int = 0
    released: int = 0
    holding: bool = False
    result_sequence: int = 0
    outcome: Outcome | None = None
    claims: list[AttemptStarted] = []
    observed: dict[tuple[int, int], int] = {}
    turns: list[Turn] = []
    hashes: dict[tuple[int, int], bytes] = {}
    actions: dict[int, ActionFacts] = {}
    reward: float | None = None
    has_tokens: bool = False
    """Something of it can be trained, if it is graded."""
    oldest_version: int = -1
    """That sampled any of the result's tokens; -1 if none did."""
    seats: dict[tuple[int, int], str] = {}
    """Observed by (attempt, turn), where an episode has several."""
    seat_rewards: tuple[tuple[str, float], ...] = ()
    """Of the seats that have one; none without seats."""
    others: dict[str, str] = {}
    """Other policies by the seat that they play."""
    asked_elsewhere: set[tuple[int, int]] = set()
    """Observations by (attempt, turn) that were not sent to the policy of their seat."""
    forged: bool = False
    """Its verdict is not of the process that held its claim."""
    sharers: tuple[str, ...] = ()
    """Those of ``others`` whose learners train it, too."""
    is_share: bool = False
    """It is the account of one of ``sharers`` (`fleetbus.core.audit.shares`)."""
    opponents: dict[str, int] = {}
    """Versions of its policy by the seat that they play."""
    limits: dict[str, SeatLimit] = {}
    """Of single seats, by seat."""

    def on_request(self, sequence: int, request: EpisodeRequested, findings: Findings) -> None:
        if self.requested:
            findings.add("requested_twice", self.episode_id, sequence)
            return
        self.requested = sequence
        self.split = request.split
        self.policy = sys.intern(request.policy)
        self.group_id = sys.intern(request.group_id)
        self.group_size = request.group_size
        self.lineage = sys.intern(request.lineage)
        if request.seats:
            seats = map_by_seat(request.seats)
            self.others = {name: sys.intern(seat.policy) for name, seat in seats.items()}
            self.sharers = request.trained_policies[1:]
            self.opponents = {name: seat.version for name, seat in seats.items() if seat.version is not None}
        if request.seat_limits:
            self.limits = map_by_seat(request.seat_limits)

    def on_claim(self, sequence: int, claim: AttemptStarted, findings: Findings) -> None:
        if self.result_sequence:
            findings.add("claim_after_result", self.episode_id, sequence)
            return
        if claim.attempt != self.attempts + 1:
            findings.add("claim_out_of_order", self.episode_id, sequence)
        self.attempts += 1
        self.holding = True
        self.claims.append(claim)

    def on_release(self, sequence: int, release: AttemptReleased, findings: Findings) -> None:
        if self.result_sequence or not self.holding or release.attempt != self.claims[-1].attempt:
            findings.add("release_not_newest", self.episode_id, sequence)
            return
        self.holding = False
        self.released += 1

    def on_observation(self, sequence: int, policy: str, observation: Observation, findings: Findings) -> None:
        attempt = observation.attempt
        if not 1 <= attempt <= self.attempts:
            findings.add("observed_unclaimed", self.episode_id, sequence)
        if 0 <= observation.turn < MAX_TURNS:
            word, bit = divmod(observation.turn, _WORD)
            self.observed[attempt, word] = self.observed.get((attempt, word), 0) | 1 << bit
        if observation.seat and (not self.result_sequence or observation.seat in self.others):  # late Actions are its policy's
            self.seats[attempt, observation.turn] = observation.seat
        if observation.seat in self.opponents and observation.pinned_version != self.opponents[observation.seat]:
            findings.add("opponent_wrong", self.episode_id, sequence)
        if not self.result_sequence:
            self.hashes[attempt, observation.turn] = observation.history_hash
            if self.requested and policy != self.others.get(observation.seat, self.policy):
                self.asked_elsewhere.add((attempt, observation.turn))

    def on_action(
        self, sequence: int, lane: str, action: Action, published: Callable[[str], Container[int]], findings: Findings
    ) -> None:
        """An Action that comes after the result is late and trains nothing; it must have been asked for all the same.
        ``published``: the versions of a policy."""
        word, bit = divmod(action.turn, _WORD)
        if not self.observed.get((action.attempt, word), 0) & 1 << bit:
            findings.add("action_unobserved", self.episode_id, sequence)
        turn = (action.attempt, action.turn)
        seat = self.seats.get(turn, "")
        policy = self.others.get(seat, self.policy)
        is_frozen = seat in self.others and policy not in self.sharers
        opponent = self.opponents.get(seat)
        if opponent is not None and any(span.version != opponent for span in action.versions):
            findings.add("opponent_wrong", self.episode_id, sequence)
        player = self.policy if opponent is not None else policy
        if (player == self.policy or not is_frozen) and any(span.version not in published(player) for span in action.versions):
            findings.add("version_unpublished", self.episode_id, sequence)
        if self.result_sequence:
            return
        if any((other.action.attempt, other.action.turn) == turn for other in self.turns):
            findings.add("action_repeated", self.episode_id, sequence)
        facts = _summarize_action(action, self.hashes.get(turn, EMPTY_HISTORY), seat, is_frozen=is_frozen)
        if turn in self.asked_elsewhere:
            facts = msgspec.structs.replace(facts, faults=(*facts.faults, "seats_wrong"))
        self.actions[sequence] = facts
        self.turns.append(Turn(sequence=sequence, lane=lane, action=_strip_action(action)))

    def on_result(self, sequence: int, result: EpisodeFinished, findings: Findings) -> None:
        if self.result_sequence:
            findings.add("second_result", self.episode_id, sequence)
            return
        self.result_sequence = sequence
        self.outcome = result.outcome
        self.take_reward(result)
        if result.attempt != (self.claims[-1].attempt if self.claims else 0):
            findings.add("result_not_newest", self.episode_id, sequence)
        if self.claims and not opens(self.claims[-1].seal, result):
            findings.add("result_not_of_claim", self.episode_id, sequence)
            self.forged = True
        if (result.reward is not None) != (result.outcome in GRADED):
            findings.add("reward_not_of_outcome", self.episode_id, sequence)
        of_seats = (seat.reward for seat in result.seats if seat.reward is not None)
        if not all(map(math.isfinite, (result.reward or 0.0, *result.turn_rewards, *of_seats))):
            findings.add("reward_not_finite", self.episode_id, sequence)
        if self.requested and (result.group_id, result.split) != (self.group_id, self.split):
            findings.add("result_not_of_request", self.episode_id, sequence)
        self._check_actions(sequence, result, findings)
        self.claims, self.turns, self.hashes, self.actions, self.asked_elsewhere = [], [], {}, {}, set()
        self.seats = {turn: seat for turn, seat in self.seats.items() if seat in self.others}

    def take_reward(self, result: EpisodeFinished) -> None:
        """Take what the episode is worth to the learner of its policy."""
        own = select_own_seats(result, self.policy if self.is_share else "")
        self.reward = result.reward
        self.seat_rewards = tuple((seat.name, seat.reward) for seat in own.seats if seat.reward is not None)
        self.has_tokens = has_tokens(own)
        self.oldest_version = min(own.policy_versions, default=-1)

    def _is_of_its_policy(self, seat: EpisodeSeat) -> bool:
        """True if the seat names the policy that plays it where that trains it; it has no reward where nobody does."""
        other, opponent = self.others.get(seat.name, ""), self.opponents.get(seat.name)
        if other and other not in self.sharers:
            is_named = opponent is None or seat.versions == (opponent,)
            return not seat.policy and seat.reward is None and is_named
        return seat.policy in (other, "") if seat.reward is None else seat.policy == other

    def _check_actions(self, sequence: int, result: EpisodeFinished, findings: Findings) -> None:
        """A result may stop before the end of its history: an Action came when it was no longer awaited."""
        if any(reference.sequence not in self.actions for reference in result.actions):
            findings.add("action_missing", self.episode_id, sequence)
            return
        history = fold_history(self.claims, self.turns)[: len(result.actions)]
        if tuple(turn.reference for turn in history) != result.actions:
            findings.add("actions_not_history", self.episode_id, sequence)
        named = [self.actions[reference.sequence] for reference in result.actions]
        for kind in {kind for action in named for kind in action.faults}:
            findings.add(kind, self.episode_id, sequence)
        if not _follow_their_segments(named):
            findings.add("history_hash_wrong", self.episode_id, sequence)
        if _describe_segments(named) != result.segments:
            findings.add("segments_wrong", self.episode_id, sequence)
        if not _fit_their_seats(named, result) or not all(map(self._is_of_its_policy, result.seats)):
            findings.add("seats_wrong", self.episode_id, sequence)
        if not fit_their_limits([(each.seat, each.prompt, each.sampled) for each in named], result, self.limits):
            findings.add("seat_limit_wrong", self.episode_id, sequence)
        counts = [(action.prompt, action.sampled) for action in named]
        tokens = sum(prompt + sampled for prompt, sampled in counts)
        if result.tokens != tokens or len(result.loss_mask) != (tokens + 7) // 8:
            findings.add("loss_mask_length", self.episode_id, sequence)
        elif int.from_bytes(result.loss_mask, "little") & ~build_sampled_mask(counts):
            findings.add("loss_mask_unsampled", self.episode_id, sequence)


def _follow_their_segments(named: Sequence[ActionFacts]) -> bool:
    """True if each Action was observed upon the hash of the segment that it extends or leaves."""
    digests: dict[int, bytes] = {}
    for action in named:
        stands_on = action.segment if action.origin is None else action.origin.parent
        if action.before != digests.get(stands_on, EMPTY_HISTORY):
            return False
        digests[action.segment] = action.after
    return True


def _fit_their_seats(named: Sequence[ActionFacts], result: EpisodeFinished) -> bool:
    """True if the result's seats are those that its turns were observed for, each in contexts of its own, and what has no
    reward is not trained."""
    if find_shared_context([action.seat for action in named], named) is not None:
        return False
    turns: dict[str, list[int]] = {}
    for turn, action in enumerate(named):
        turns.setdefault(action.seat, []).append(turn)
    if set(turns) <= {""}:
        return not result.seats
    if [(seat.name, list(seat.turns)) for seat in result.seats] != list(turns.items()):
        return False
    marked = {each.turn for each in result.untrained if each.reason == "seat"}
    return result.outcome not in GRADED or marked <= result.unrewarded_turns <= {each.turn for each in result.untrained}


def _describe_segments(named: Sequence[ActionFacts]) -> tuple[EpisodeSegment, ...] | None:
    """The segments of a result with these Actions; None if they are no tree."""
    tree = SegmentTree()
    try:
        for action in named:
            tree.add(action.segment, action.origin, prompt=action.prompt, sampled=action.sampled)
    except SegmentError:
        return None
    return describe_segments(tree.segments)


def _summarize_action(action: Action, before: bytes, seat: str, *, is_frozen: bool) -> ActionFacts:
    prompt, sampled = count_tokens(action.prompt_delta), count_tokens(action.sampled)
    """What a segment keeps of its parent is no longer known here: the first hash of its chain is left to the deep audit."""
    start = before if action.origin is None else EMPTY_HISTORY
    after = extend_history(start, action.prompt_delta, action.sampled, [image.object for image in action.images])
    is_known = action.origin is None or action.origin.kept == 0
    logprobs = unpack_logprobs(action.logprobs) if len(action.logprobs) == TOKEN_BYTES * sampled else None
    stops = [0, *(span.stop for span in action.versions)]
    faults = {
        "history_hash_wrong": is_known and action.history_hash != after,
        "logprobs_missing": logprobs is None or not (is_frozen or math.isfinite(sum(logprobs))),
        "versions_missing": [span.start for span in action.versions] != stops[:-1] or stops[-1] != sampled,
    }
    return ActionFacts(
        prompt=prompt,
        sampled=sampled,
        before=before,
        after=action.history_hash,
        segment=action.segment,
        origin=action.origin,
        seat=seat,
        faults=tuple(kind for kind, found in faults.items() if found),
    )


def _strip_action(action: Action) -> Action:
    """The Action without its contents, except that it keeps a token if it has any: without one it is no turn of a history."""
    return Action(
        episode_id=action.episode_id, attempt=action.attempt, turn=action.turn, text="", sampled=action.sampled[:TOKEN_BYTES]
    )
