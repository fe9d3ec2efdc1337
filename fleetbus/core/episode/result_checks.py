"""Checks that the Actions of a result can be trained: what one worker reports against what another one sampled. Pure.

An episode in which they do not fit is not trained, with a reason, and its learner continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import SegmentError, fold_segments, hash_kept
from fleetbus_schemas import GRADED, Action, EpisodeFinished, SegmentOrigin
from fleetbus_schemas.names import is_name
from fleetbus_schemas.seat import ELSEWHERE, MAX_SEATS
from fleetbus_schemas.tokens import TOKEN_BYTES, count_tokens, extend_history, unpack_ids, unpack_logprobs

MAX_INT32 = 2**31 - 1
"""Trainers hold token ids and policy versions in 32 bits."""


def find_actions_problem(result: EpisodeFinished, actions: Sequence[Action], *, vocabulary: int = 0) -> str:
    """Find the fault in the Actions of a result, in turn order, as one line; empty if they can be trained.

    Token ids have to be below ``vocabulary``; 0: they have to fit 32 bits. Those of a seat without a reward, which another
    model may have sampled, are any, and need no log-probabilities.
    """
    unrewarded = result.unrewarded_turns
    for turn, action in enumerate(actions):
        problem = _find_shape_problem(action, result.episode_id, turn)
        if turn not in unrewarded:
            problem = problem or _find_sampling_problem(action, vocabulary or MAX_INT32 + 1)
        if problem:
            return f"turn {turn}: {problem}"
    if result.seats and (problem := _find_seats_problem(result, actions)):
        return problem
    apart = unrewarded.union(*(seat.turns for seat in result.seats if seat.policy))  # these name versions of their own
    sampled = {span.version for turn, each in enumerate(actions) if turn not in apart for span in each.versions}
    if not sampled <= set(result.policy_versions):  # by these a learner tells how old the episode is
        return f"the result names the versions {sorted(result.policy_versions)}, its Actions {sorted(sampled)}"
    if problem := _find_history_problem(actions):
        return problem
    untrained = {each.turn for each in result.untrained}
    counts = [(count_tokens(action.prompt_delta), count_tokens(action.sampled)) for action in actions]
    counts = [(sum(each), 0) if turn in untrained else each for turn, each in enumerate(counts)]
    tokens = sum(map(sum, counts))
    if result.tokens != tokens or result.loss_mask != build_sampled_mask(counts).to_bytes((tokens + 7) // 8, "little"):
        return f"the result counts {result.tokens} tokens, and its mask is not that of the {tokens} of its Actions"
    return ""


def _find_seats_problem(result: EpisodeFinished, actions: Sequence[Action]) -> str:
    names = {seat.name for seat in result.seats}
    if not len(result.seats) == len(names) <= MAX_SEATS or not all(map(is_name, names)):
        return f"its seats are not up to {MAX_SEATS} different names"
    if sorted(turn for seat in result.seats for turn in seat.turns) != list(range(len(actions))):
        return "its seats have other turns than were played, or one turn twice"
    if not all(seat.turns and list(seat.turns) == sorted(seat.turns) for seat in result.seats):
        return "its seats have no turns, or not in their order"
    for seat in result.seats:  # by these another policy's learner tells how old the episode is
        sampled = {span.version for turn in seat.turns for span in actions[turn].versions}
        if seat.policy and set(seat.versions) != sampled:
            return f"the seat {seat.name} names the versions {sorted(seat.versions)}, its Actions {sorted(sampled)}"
    untrained = {each.turn for each in result.untrained}
    elsewhere = {turn for seat in result.seats if seat.reason == ELSEWHERE for turn in seat.turns}
    if result.outcome in GRADED and not result.unrewarded_turns - elsewhere <= untrained:
        return "it trains turns of a seat without a reward"
    owners = {turn: seat.name for seat in result.seats for turn in seat.turns}
    # else a sequence that is trained would begin with what another seat sampled, whose ids may be those of another model
    if (turn := find_shared_context([owners[turn] for turn in range(len(actions))], actions)) is not None:
        return f"turn {turn}: the seat {owners[turn]} plays in the context of another"
    return ""


def _find_history_problem(actions: Sequence[Action]) -> str:
    """Actions of two attempts make no history: what was sampled after one answer is not trained after another."""
    try:
        segments = fold_segments(actions)
    except SegmentError:
        return ""  # those who build its sequences say so
    turns = [Turn(sequence=0, lane="", action=action) for action in actions]
    for segment, digest in zip(segments, hash_kept(segments, turns), strict=True):
        for turn in segment.turns:
            images = [image.object for image in actions[turn].images]
            digest = extend_history(digest, actions[turn].prompt_delta, actions[turn].sampled, images)
            if actions[turn].history_hash not in (b"", digest):
                return f"turn {turn}: it was sampled after another history"
    return ""


class Placed(Protocol):
    """A turn with its segment, and where that leaves its parent if it begins with this turn."""

    @property
    def segment(self) -> int: ...
    @property
    def origin(self) -> SegmentOrigin | None: ...


def find_shared_context(seats: Iterable[str], turns: Iterable[Placed]) -> int | None:
    """The first turn that is in, or leaves, a segment of another seat than its own; None if each has contexts of its own."""
    owners: dict[int, str] = {}
    for number, (seat, turn) in enumerate(zip(seats, turns, strict=True)):
        stands_on = turn.segment if turn.origin is None else turn.origin.parent
        if owners.setdefault(turn.segment, seat) != seat or owners.get(stands_on, seat) != seat:
            return number
    return None


def build_sampled_mask(counts: Sequence[tuple[int, int]]) -> int:
    """A loss mask that trains every sampled token, as an integer; ``counts`` are prompt and sampled tokens by turn."""
    bits = position = 0
    for prompt, sampled in counts:
        bits |= ((1 << sampled) - 1) << position + prompt
        position += prompt + sampled
    return bits


def _find_shape_problem(action: Action, episode_id: str, turn: int) -> str:
    if (action.episode_id, action.turn) != (episode_id, turn):
        return f"the Action is that of turn {action.turn} of episode {action.episode_id}"
    if len(action.prompt_delta) % TOKEN_BYTES or len(action.sampled) % TOKEN_BYTES:
        return f"its ids are no whole numbers of {TOKEN_BYTES} bytes"
    if len(action.logprobs) != len(action.sampled):
        return f"{len(action.sampled)} bytes of sampled ids have {len(action.logprobs)} bytes of log-probabilities"
    if not all(0 <= image.start <= image.stop <= count_tokens(action.prompt_delta) for image in action.images):
        return "its images are not within its prompt"
    keeps_nothing = not turn if action.origin is None else not action.origin.kept
    if keeps_nothing and not action.prompt_delta:
        return "its sequence begins without a prompt"
    return ""


def _find_sampling_problem(action: Action, limit: int) -> str:
    if not math.isfinite(sum(unpack_logprobs(action.logprobs))):  # 32 bits each: a sum of finite ones is finite
        return "its log-probabilities are not finite"
    if (highest := max(unpack_ids(action.prompt_delta + action.sampled), default=0)) >= limit:
        return f"token id {highest} is not below {limit}"
    if not all(0 <= span.version <= MAX_INT32 for span in action.versions):
        return f"its policy versions are not from 0 to {MAX_INT32}"
    return ""
