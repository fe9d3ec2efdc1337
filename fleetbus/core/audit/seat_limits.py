"""Holds the turns of one result against the limits of its seats (docs/decisions/0256-limits-of-seats.md). Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from fleetbus_schemas import EpisodeFinished, SeatLimit


def fit_their_limits(turns: Sequence[tuple[str, int, int]], result: EpisodeFinished, limits: Mapping[str, SeatLimit]) -> bool:
    """True if no seat had a turn beyond its limits, and a result that ends for one has a seat that had reached it.

    ``turns`` are seat, prompt tokens and sampled tokens, in order. An answer may be longer than what was left: servers that
    tell no tokens bound it by their own. So its prompt has to leave room for one token.
    """
    played: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for seat, prompt, sampled in turns:
        limit = limits.get(seat)
        if limit is not None and limit.max_turns is not None and played[seat] >= limit.max_turns:
            return False
        if limit is not None and limit.max_tokens is not None and tokens[seat] + prompt >= limit.max_tokens:
            return False
        played[seat] += 1
        tokens[seat] += prompt + sampled
    match result.error_class if result.outcome == "truncated" else "":
        case "seat_turns":
            return any(limit.max_turns is not None and played[limit.seat] >= limit.max_turns for limit in limits.values())
        case "seat_tokens":
            return any(limit.max_tokens is not None for limit in limits.values())
    return True
