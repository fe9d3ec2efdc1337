"""The end of an attempt, as its runner keeps it: what becomes a result once there is a verdict. Pure data."""

import msgspec

from fleetbus_schemas import Outcome
from fleetbus_workers.environment.episode.stages import DEADLINE_PASSED


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, before or after its verdict."""

    outcome: Outcome
    error_class: str = ""
    error: str = ""
    reward: float | None = None
    location: str = ""
    traceback: str = ""
    note: str = ""
    components: dict[str, float] = {}
    transcript: str = ""


def grade_timeout(conclusion: Conclusion, reward: float | None, turns: int) -> Conclusion:
    """Make a time-out that was given a ``reward`` a truncated episode, if the policy sampled anything in it."""
    if conclusion.outcome != "timeout" or reward is None or not turns:
        return conclusion
    return msgspec.structs.replace(
        conclusion, outcome="truncated", reward=reward, note=conclusion.error, error="", traceback=""
    )


TIMED_OUT = Conclusion(outcome="timeout", error_class="episode_timeout", error=DEADLINE_PASSED)
