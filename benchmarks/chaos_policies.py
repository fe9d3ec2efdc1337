"""The episodes that the learner of each policy trained in a run of several, read out of its log.

Counted apart from the audit, from steps that survive and the results that they name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.chaos_recovery import Entry
from fleetbus.bus.base import Bus
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.episodes import read_entry
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, LineageStarted, StepTrained
from fleetbus_schemas.channels import STORED

COMPARED_STEPS = 5
"""First and last steps whose rewards are compared."""


def build_policies(log: Sequence[Entry], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By policy: lineages, steps and episodes that count, those trained more than once or by a learner that has no part in
    them, and the mean reward of its seats in the first and last steps."""
    requests = {each.message.episode_id: each.message for each in log if isinstance(each.message, EpisodeRequested)}
    results = {each.message.episode_id: each.message for each in log if isinstance(each.message, EpisodeFinished)}
    return {policy: _build(log, policy, requests, results) for policy in policies}


async def wait_until_trained(bus: Bus, subjects: Sequence[str]) -> None:
    """Until a step stands on each of these subjects: on a busy machine a learner needs longer to begin than until its kill."""
    waiting = set(subjects)
    async with bus.read(list(subjects)) as reader:
        while waiting:
            entry = await reader.receive()
            if isinstance(read_entry(STORED["train"], entry), StepTrained):
                waiting.discard(entry.subject)


def _build(
    log: Sequence[Entry], policy: str, requests: dict[str, EpisodeRequested], results: dict[str, EpisodeFinished]
) -> dict[str, Any]:
    own = [entry.message for entry in log if entry.subject.endswith(f".train.{policy}")]
    lineages = [message for message in own if isinstance(message, LineageStarted)]
    surviving = compute_surviving_steps(lineages)
    stored = [message for message in own if isinstance(message, StepTrained)]
    steps = [step for step in stored if is_surviving(surviving, step.lineage, step.step)]
    times = Counter(episode for step in steps for episode in step.episodes)
    rewards = [_list_rewards(step, policy, requests, results) for step in steps]
    return {
        "lineages": len(lineages),
        "steps": len(steps),
        "steps_in_all": len(stored),
        "trained": len(times),
        "excluded": sum(len(step.excluded) for step in steps),
        "trained_twice": sum(count > 1 for count in times.values()),
        "trained_by_the_wrong_learner": sum(not _has_part(policy, requests.get(each), results.get(each)) for each in times),
        "reward_start": _compute_mean(rewards[:COMPARED_STEPS]),
        "reward_end": _compute_mean(rewards[-COMPARED_STEPS:]),
    }


def _has_part(policy: str, request: EpisodeRequested | None, result: EpisodeFinished | None) -> bool:
    if request is None or result is None or policy not in request.trained_policies:
        return False
    return any(seat.reward is not None for seat in result.seats if (seat.policy or request.policy) == policy)


def _list_rewards(
    step: StepTrained, policy: str, requests: dict[str, EpisodeRequested], results: dict[str, EpisodeFinished]
) -> list[float]:
    return [
        seat.reward
        for episode in step.episodes
        if episode in results and episode in requests
        for seat in results[episode].seats
        if seat.reward is not None and (seat.policy or requests[episode].policy) == policy
    ]


def _compute_mean(rewards: Sequence[Sequence[float]]) -> float | None:
    values = [reward for step in rewards for reward in step]
    return round(fmean(values), 3) if values else None
