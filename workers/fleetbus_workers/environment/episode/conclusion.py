"""The end of an attempt, as its runner keeps it: what becomes a result once there is a verdict. Pure data."""

from typing import Any

import msgspec

from fleetbus_schemas import Outcome
from fleetbus_workers.environment.base import Verdict
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


def take_parts(verdict: Verdict) -> dict[str, Any]:
    """The parts of a grade beside the reward, as fields of a `Conclusion`."""
    return {"components": verdict.components, "transcript": verdict.transcript.encode("utf-8", "replace").decode()}


def grade_timeout(conclusion: Conclusion, reward: float | None, turns: int) -> Conclusion:
    """Grade a time-out that was given a ``reward``: a truncated episode, if the policy sampled anything in it."""
    if conclusion.outcome != "timeout" or reward is None or not turns:
        return conclusion
    return msgspec.structs.replace(
        conclusion, outcome="truncated", reward=reward, note=conclusion.error, error="", traceback=""
    )


TIMED_OUT = Conclusion(outcome="timeout", error_class="episode_timeout", error=DEADLINE_PASSED)
