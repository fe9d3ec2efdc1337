"""Proves the rewards that a step was trained with where a judge of groups changed them. Pure.

All other trained rewards are those of results, which the digests of the deep audit prove.
"""

import math
from collections.abc import Iterator, Mapping

from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus_schemas import LineageStarted, StepTrained

TOLERANCE = 1e-9


def judge_rewards(
    step: StepTrained, started: LineageStarted | None, episodes: Mapping[str, EpisodeAudit]
) -> Iterator[tuple[str, bool | None]]:
    """Of each episode with a reward of its own whether a judge's score explains it; None if the lineage does not say whether it
    has a judge."""
    judge = started.settings.get("group_judge") if started is not None else None
    for episode_id, reward in step.rewards.items():
        if judge is None:
            yield episode_id, None
            continue
        weight, score = float(judge.get("weight", 0.0)), step.scores.get(episode_id, math.nan)
        episode = episodes.get(episode_id)
        own = episode.reward if episode is not None and episode.reward is not None else math.nan
        is_trained = bool(weight) and episode_id in step.episodes
        yield episode_id, is_trained and math.isclose(reward, own + weight * score, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
