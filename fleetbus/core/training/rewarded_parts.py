"""The parts of episodes that have a reward of their own: whole episodes, or their seats. Pure.

A part is compared with the same part of the other episodes of its group: the first player with first players, for both sides
of a game are seldom worth the same. So the baseline depends on the role, as SPIRAL's role-conditioned advantage does (arXiv
2506.24119); there it is a moving average over games, here the mean of the group. Of a league all episodes of a group are asked
for against one opponent; where a learner that was replaced had asked for some against another, those are a group of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from fleetbus.core.algorithms.shaping import has_zero_variance
from fleetbus.core.training.groups import Group
from fleetbus_schemas import EpisodeFinished
from fleetbus_schemas.seat import SHARED


class RewardedPart(msgspec.Struct, frozen=True, kw_only=True):
    """``turns`` of the graded episode number ``episode`` with one ``reward``, to be compared within ``group``."""

    episode: int
    group: int
    turns: Sequence[int]
    reward: float


def list_parts(groups: Sequence[Group]) -> list[RewardedPart]:
    """The parts of all graded episodes of ``groups``, in their order. Seats without a reward are none."""
    numbers: dict[tuple[int, str, tuple[int, ...]], int] = {}
    parts: list[RewardedPart] = []
    episode = 0
    for number, group in enumerate(groups):
        for result in group.graded:
            for name, turns, reward in _split(result):
                key = numbers.setdefault((number, name, list_opponents(result)), len(numbers))
                parts.append(RewardedPart(episode=episode, group=key, turns=turns, reward=reward))
            episode += 1
    return parts


def list_opponents(result: EpisodeFinished) -> tuple[int, ...]:
    """The versions of the policy that played seats against it."""
    return tuple(version for seat in result.seats if not seat.policy for version in seat.versions)


def list_rewards(result: EpisodeFinished) -> list[tuple[str, float]]:
    """The rewards of a graded result by part."""
    return [(name, reward) for name, _, reward in _split(result)]


def has_no_signal(members: Iterable[Iterable[tuple[str, float]]]) -> bool:
    """True if the rewards of a group's members, by part, are equal in each part: every advantage would be zero, and dynamic
    sampling replaces the group."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for name, reward in chain.from_iterable(members):
        rewards[name].append(reward)
    return all(map(has_zero_variance, rewards.values()))


def _split(result: EpisodeFinished) -> list[tuple[str, Sequence[int], float]]:
    assert result.reward is not None
    if result.seats:
        rewarded = [(seat, seat.reward) for seat in result.seats if seat.reward is not None]
        return [(seat.name, seat.turns, result.reward if seat.reason == SHARED else own) for seat, own in rewarded]
    return [("", range(len(result.actions)), result.reward)]
