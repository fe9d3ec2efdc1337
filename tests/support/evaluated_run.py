"""Held-out episodes in a run's log: an evaluation with a reward per task."""

from __future__ import annotations

from collections.abc import Mapping

from fleetbus.bus.base import Bus
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, Subjects, Task, encode


async def publish_evaluation(bus: Bus, run: str, name: str, rewards: Mapping[str, float]) -> None:
    """The requests and results of an evaluation of lineage ``a``."""
    subjects = Subjects(run)
    for index, (task, reward) in enumerate(rewards.items()):
        id, group = f"a-{name}-{index:04}", f"a-{name}"
        request = EpisodeRequested(
            episode_id=id, group_id=group, sample_index=index, split="eval", task=Task(key=task, prompt=task), policy="default",
            deadline_ns=0,
        )  # fmt: skip
        await bus.publish(subjects.task("default", id), encode(request))
        finished = EpisodeFinished(
            episode_id=id, group_id=group, attempt=1, outcome="completed", worker="environment-1", task_key=task, reward=reward,
            split="eval", turns=1, tokens=12,
        )  # fmt: skip
        await bus.publish(subjects.episode(id), encode(finished))
