"""Parts of a learner that the configuration names: its tasks, and the judge of whole groups."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.reward_components import JUDGE
from fleetbus_workers.environment.adapters.warehouse.tasks import build_held_out_tasks, build_train_tasks
from fleetbus_workers.judge.opening import open_judge, read_weights
from fleetbus_workers.learner.curriculum import Curriculum, load_curriculum
from fleetbus_workers.learner.group_judge import GroupJudge

WAREHOUSE_TASKS = 4096
"""Training tasks of the default environment: more than a run of the default length plays."""


def build_curriculum(configuration: Configuration) -> Curriculum:
    """Training and held-out tasks. Raises `UserError` for a tasks file that cannot be read."""
    run = configuration.run
    if run.tasks:
        return load_curriculum(run.tasks, seed=run.seed, held_out_share=configuration.evaluation.held_out)
    held_out = build_held_out_tasks(configuration.evaluation.episodes)
    return Curriculum(build_train_tasks(WAREHOUSE_TASKS, seed=run.seed), held_out, seed=run.seed)


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
