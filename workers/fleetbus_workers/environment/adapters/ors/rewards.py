"""The reward of an episode out of the rewards of its calls, and the cases in which there is none. Pure.

The standard's rewards are "accumulated over an episode", and may be absent from a call. A server in Python sends NaN and
infinity as null, so a last call without a reward may be one that went wrong: it is no reward, never the sum of the others. See
docs/decisions/0260-calls-of-the-open-reward-standard-run-once.md.
"""

from __future__ import annotations

import math
from typing import Literal

from fleetbus_workers.environment.base import Verdict

NO_REWARD = "the environment gave no reward for this call, or one that is no number"
NONE_AT_ALL = "the environment gave no reward"
NONE_AT_THE_END = "the call that ended the episode gave no reward, or one that is no number"


class EpisodeRewards:
    """``rule``: the ``sum`` of all calls, or the ``last`` reward that there was, as some trainers read environments."""

    def __init__(self, rule: Literal["sum", "last"]) -> None:
        self._rule = rule
        self._given: list[float | None] = []
        self.finished = False
        self.refusal = ""
        """The reason why the final answer could not be graded, if so."""

    @property
    def calls(self) -> int:
        return len(self._given)

    def record(self, reward: float | None, *, finished: bool) -> float | None:
        """A call's own part of the episode's reward, None if it gave none; where the last one counts, what it has beyond the
        one before."""
        given = reward if reward is not None and math.isfinite(reward) else None
        before = next((each for each in reversed(self._given) if each is not None), 0.0) if self._rule == "last" else 0.0
        self._given.append(given)
        self.finished = finished
        return None if given is None else given - before

    def verdict(self) -> Verdict:
        """The episode's; no reward if the environment gave none where it had to."""
        rewards = [reward for reward in self._given if reward is not None]
        if self.refusal or not rewards:
            return Verdict(reward=None, reason=self.refusal or NONE_AT_ALL)
        if self.finished and self._given[-1] is None:
            return Verdict(reward=None, reason=NONE_AT_THE_END)
        return Verdict(reward=rewards[-1] if self._rule == "last" else math.fsum(rewards))
