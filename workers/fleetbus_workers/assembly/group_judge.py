"""The judge of whole groups that the configuration names, for a learner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleetbus.config.settings import Configuration
from fleetbus.core.reward_components import JUDGE
from fleetbus_workers.judge.opening import open_judge, read_weights
from fleetbus_workers.learner.group_judge import GroupJudge


@asynccontextmanager
async def open_group_judge(configuration: Configuration) -> AsyncIterator[GroupJudge | None]:
    """None where rewards are complete when an episode ends. Raises `UserError`."""
    reward = configuration.reward
    if not reward.judge_url or reward.judge_mode != "group":
        yield None
        return
    weight = read_weights(reward, judged=True).get(JUDGE, 0.0)
    async with open_judge(reward) as judge:
        yield GroupJudge(judge, weight=weight, max_abs_reward=configuration.environment.max_abs_reward)
