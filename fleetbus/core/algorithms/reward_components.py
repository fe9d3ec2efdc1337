"""A reward out of named components: which count, with what weight, and what is missing. Pure."""

import math
from collections.abc import Iterable, Mapping

from fleetbus_schemas import EpisodeFinished

MAX_ABS_REWARD = 1e6
"""Default of `environment.max_abs_reward`."""

NOT_FINITE, OUT_OF_BOUNDS = "reward_not_finite", "reward_out_of_bounds"


def find_reward_problem(rewards: Iterable[float], limit: float) -> str:
    """The error class of the first reward that is not a number from ``-limit`` to ``limit``, empty if all are: two of 1e308 add
    up to infinity, and advantages of a whole batch become NaN."""
    for reward in rewards:
        if not math.isfinite(reward):
            return NOT_FINITE
        if abs(reward) > limit:
            return OUT_OF_BOUNDS
    return ""


def list_all_rewards(result: EpisodeFinished) -> tuple[float, ...]:
    """Every number of a result that can become part of an advantage: of turns, of the episode, of its seats."""
    seats = (number for seat in result.seats for number in (seat.reward, seat.score) if number is not None)
    return (*result.turn_rewards, 0.0 if result.reward is None else result.reward, *seats)


VERIFIER, JUDGE = "verifier", "judge"
"""Names that are fleetbus's own: the environment's verdict, and a judge's score from 0 to 1."""

MAX_COMPONENTS = 32
MAX_NAME_CHARACTERS = 64


def parse_weights(text: str, *, judged: bool) -> dict[str, float]:
    """``NAME=WEIGHT`` pairs, comma separated, by name; empty ``text`` is the verifier alone, and the judge beside it if
    ``judged``. Raises `ValueError` that says what is wrong."""
    if not text.strip():
        return {VERIFIER: 1.0, JUDGE: 1.0} if judged else {VERIFIER: 1.0}
    weights: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = (part.strip() for part in pair.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight):
            raise ValueError(f"{pair.strip()!r} is no NAME=WEIGHT, as in verifier=1,judge=0.5")
        if name in weights:
            raise ValueError(f"{name} has two weights")
        weights[name] = weight
    if JUDGE in weights and not judged:
        raise ValueError("the judge has a weight, and no judge is set (reward.judge_url)")
    return weights


def find_missing(components: Mapping[str, float], weights: Mapping[str, float]) -> list[str]:
    """The components that count and have no value."""
    return [name for name, weight in weights.items() if weight and name not in components]


def combine(components: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted sum; raises `KeyError` for a component that counts and is missing. Components without a weight count
    nothing: they are recorded and shown."""
    return math.fsum(weight * components[name] for name, weight in weights.items() if weight)
