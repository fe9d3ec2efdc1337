"""When an episode counts as a success: as its environment says, else by its reward. Pure."""

from collections.abc import Mapping

from fleetbus_schemas import EpisodeFinished

SUCCESS = 1.0
"""A reward of at least this is a success where the environment does not say, unless the settings give another threshold."""

SUCCESS_KEYS = ("success", "is_success")
"""What environments of Gymnasium, of VAGEN and their like call it in their ``info``."""


def success_in(info: Mapping[str, object]) -> bool | None:
    """What an environment's ``info`` says of success; None if it says nothing."""
    for key in SUCCESS_KEYS:
        if isinstance(info.get(key), (bool, int, float)):
            return bool(info[key])
    return None


def is_success(result: EpisodeFinished, threshold: float = SUCCESS) -> bool:
    """Whether a graded episode is a success: as its environment says, else with a reward of at least ``threshold``."""
    return (result.reward or 0.0) >= threshold if result.success is None else result.success
