"""Logs of a game of two seats in which something about the seats is not so. See `tests/unit/test_audit_forgeries.py`."""

from __future__ import annotations

import math
from typing import Any

from fleetbus_schemas import NEW_ROOT, EpisodeSeat, EpisodeSegment, SeatLimit, SeatPolicy, SegmentOrigin, UntrainedTurn
from fleetbus_schemas.tokens import EMPTY_HISTORY, pack_logprobs, pack_mask
from tests.support.log_builder import PROMPT, SAMPLED, LogBuilder, compute_history_hash

ORIGIN = SegmentOrigin(parent=NEW_ROOT, kept=0, reason="seat")
TOKENS = PROMPT + SAMPLED
SEATS = (
    EpisodeSeat(name="first", turns=(0, 2), reward=1.0),
    EpisodeSeat(name="second", turns=(1,), reason="its verdict is None"),
)
SEGMENTS = (
    EpisodeSegment(origin=None, first_turn=0, turns=2, tokens=2 * TOKENS),
    EpisodeSegment(origin=ORIGIN, first_turn=1, turns=1, tokens=TOKENS),
)
UNTRAINED = (UntrainedTurn(turn=1, reason="seat"),)


def opponent_of_another_version(log_builder: LogBuilder) -> None:
    log_builder.request("a", seats=(SeatPolicy(seat="second", policy="second", version=0),))
    log_builder.claim("a")
    log_builder.observe("a", 0, seat="second", policy="second", pinned_version=1)


def play_game(
    log_builder: LogBuilder,
    asked: tuple[str, ...] = ("first", "second", "first"),
    other: str = "",
    *,
    is_trained: bool = False,
    limits: tuple[SeatLimit, ...] = (),
    **changes: Any,
) -> None:
    """Turns 0 and 2 in one context, turn 1 in another, which is not trained. The second seat may be another policy's, of which
    ``other`` is asked, and which a learner of its own may train."""
    policy = "solver" if is_trained else "simulator"
    others = (SeatPolicy(seat="second", policy=policy, trained=is_trained),) if other else ()
    log_builder.request("a", seats=others, seat_limits=limits)
    log_builder.claim("a")
    actions = []
    for turn, (seat, segment, before) in enumerate(zip(asked, (0, 1, 0), (0, 0, 1), strict=True)):
        origin = ORIGIN if segment else None
        observed = compute_history_hash(before) if before else EMPTY_HISTORY
        policy = other or "default" if seat == "second" else "default"
        log_builder.observe("a", turn, history_hash=observed, seat=seat, segment=segment, origin=origin, policy=policy)
        hashed = compute_history_hash(before + 1)
        unlearnable: dict[str, Any] = {"version": 77, "logprobs": pack_logprobs([math.nan] * SAMPLED)}
        strange = unlearnable if policy == "simulator" else {}
        actions.append(log_builder.act("a", turn, history_hash=hashed, segment=segment, origin=origin, **strange))
    mask = [*[False] * PROMPT, *[True] * SAMPLED, *[False] * TOKENS, *[False] * PROMPT, *[True] * SAMPLED]
    sound = {"seats": SEATS, "segments": SEGMENTS, "untrained": UNTRAINED, "loss_mask": pack_mask(mask)}
    log_builder.finish("a", actions, **sound | changes)


def seats_invented(log_builder: LogBuilder) -> None:
    log_builder.play("a", seats=(EpisodeSeat(name="first", turns=(0,), reward=1.0),))


def seats_left_out(log_builder: LogBuilder) -> None:
    play_game(log_builder, seats=(), untrained=())


def turns_exchanged_between_seats(log_builder: LogBuilder) -> None:
    exchanged = (EpisodeSeat(name="first", turns=(1,), reward=1.0), EpisodeSeat(name="second", turns=(0, 2)))
    play_game(log_builder, seats=exchanged, untrained=tuple(UntrainedTurn(turn=turn, reason="seat") for turn in (0, 2)))


def context_shared_by_seats(log_builder: LogBuilder) -> None:
    """Seats that say the truth about turns, of which the third went on in the context of another."""
    asked = ("first", "second", "second")
    seats = (EpisodeSeat(name="first", turns=(0,), reward=1.0), EpisodeSeat(name="second", turns=(1, 2), reward=1.0))
    play_game(log_builder, asked, seats=seats, untrained=())


def unrewarded_seat_trained(log_builder: LogBuilder) -> None:
    play_game(log_builder, untrained=())


def rewarded_seat_left_out(log_builder: LogBuilder) -> None:
    """A turn that is left out for its seat, which has a reward."""
    play_game(log_builder, untrained=(UntrainedTurn(turn=0, reason="seat"), *UNTRAINED))


def seat_of_another_policy_trained(log_builder: LogBuilder) -> None:
    rewarded = (SEATS[0], EpisodeSeat(name="second", turns=(1,), reward=1.0))
    mask = [*[False] * PROMPT, *[True] * SAMPLED] * 3
    play_game(log_builder, other="simulator", seats=rewarded, untrained=(), loss_mask=pack_mask(mask))


def seat_asked_of_the_trained_policy(log_builder: LogBuilder) -> None:
    play_game(log_builder, other="default")


def seat_asked_of_a_policy_that_nobody_named(log_builder: LogBuilder) -> None:
    play_game(log_builder, other="third")


FORGED_SEATS = (
    seats_invented,
    seats_left_out,
    turns_exchanged_between_seats,
    context_shared_by_seats,
    seat_of_another_policy_trained,
    seat_asked_of_the_trained_policy,
    seat_asked_of_a_policy_that_nobody_named,
    unrewarded_seat_trained,
    rewarded_seat_left_out,
)
"""Each is found as ``seats_wrong``."""


def seat_beyond_its_turns(log_builder: LogBuilder) -> None:
    play_game(log_builder, limits=(SeatLimit(seat="second"), SeatLimit(seat="first", max_turns=1)))


def seat_beyond_its_tokens(log_builder: LogBuilder) -> None:
    """The prompt of its second turn left no room for an answer."""
    play_game(log_builder, limits=(SeatLimit(seat="first", max_tokens=TOKENS + PROMPT),))


def ended_for_a_limit_that_was_not_reached(log_builder: LogBuilder) -> None:
    limits = (SeatLimit(seat="first", max_turns=3, max_tokens=2 * TOKENS),)
    play_game(log_builder, limits=limits, outcome="truncated", error_class="seat_turns")


def ended_for_a_limit_that_nobody_set(log_builder: LogBuilder) -> None:
    play_game(log_builder, limits=(SeatLimit(seat="first", max_turns=2),), outcome="truncated", error_class="seat_tokens")


FORGED_LIMITS = (
    seat_beyond_its_turns,
    seat_beyond_its_tokens,
    ended_for_a_limit_that_was_not_reached,
    ended_for_a_limit_that_nobody_set,
)
"""Each is found as ``seat_limit_wrong``."""
