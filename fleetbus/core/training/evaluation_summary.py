"""Summary of held-out episodes: success, pass@k, per environment. Pure.

Only graded episodes count; one that failed in the infrastructure is not evidence about the policy, and is counted separately.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from fleetbus.core.algorithms.means import compute_mean
from fleetbus_schemas import GRADED, EpisodeFinished

SUCCESS = 1.0
"""A reward of at least this is a success where the environment does not say, unless the settings give another threshold."""

SUCCESS_KEYS = ("success", "is_success")
"""What environments of Gymnasium, of VAGEN and their like call it in their ``info``."""


def success_in(info: Mapping[str, object]) -> bool | None:
    """The success that an environment's ``info`` states; None if it states none."""
    for key in SUCCESS_KEYS:
        if isinstance(info.get(key), (bool, int, float)):
            return bool(info[key])
    return None


def is_success(result: EpisodeFinished, threshold: float = SUCCESS) -> bool:
    """True if a graded episode is a success: as its environment says, else with a reward of at least ``threshold``."""
    return (result.reward or 0.0) >= threshold if result.success is None else result.success


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of episodes: how many were played and graded, the share of successes, the mean reward, and pass@k by k (only where a
    task has k graded episodes; the mean over such tasks). ``not_graded`` counts the others by outcome."""

    tasks: int
    episodes: int
    graded: int
    success: float
    mean_reward: float
    pass_at: dict[str, float]
    not_graded: dict[str, int]
    versions: tuple[int, ...]


INTERVAL_ROOT = 1.96
"""Standard deviations to either side of a 95 % interval."""


def find_interval(success: float, graded: int, tasks: int = 0) -> tuple[float, float]:
    """The 95 % interval (Wilson 1927) of a share of ``graded`` episodes. Episodes of one task resemble each other: with fewer
    ``tasks`` (0: not known) those count, which is at most too wide."""
    count = min(graded, tasks) if tasks else graded
    if not count:
        return 0.0, 1.0
    square = INTERVAL_ROOT**2
    middle = (success + square / (2 * count)) / (1 + square / count)
    spread = INTERVAL_ROOT / (1 + square / count) * math.sqrt(success * (1 - success) / count + square / (4 * count**2))
    return max(middle - spread, 0.0), min(middle + spread, 1.0)


def pass_at(k: int, *, samples: int, successes: int) -> float:
    """The chance that at least one of ``k`` of the samples, drawn without replacement, is a success:
    ``1 - C(n - c, k) / C(n, k)``, unbiased (Chen et al. 2021, arXiv 2107.03374). ``k`` is at most ``samples``."""
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def summarise_results(results: Sequence[EpisodeFinished], ks: Sequence[int], *, success_threshold: float = 1.0) -> Summary:
    """Results of any tasks; those of one task share a group id. Where the environment does not say, a reward of at least
    ``success_threshold`` is a success."""
    graded = [result for result in results if result.outcome in GRADED and result.reward is not None]
    rewards = [result.reward for result in graded if result.reward is not None]
    by_task: defaultdict[str, list[bool]] = defaultdict(list)
    for result in graded:
        by_task[result.group_id].append(is_success(result, success_threshold))
    found = {}
    for k in sorted(set(ks)):
        values = [pass_at(k, samples=len(wins), successes=sum(wins)) for wins in by_task.values() if len(wins) >= k]
        if values:
            found[str(k)] = math.fsum(values) / len(values)
    return Summary(
        tasks=len({result.group_id for result in results}),
        episodes=len(results),
        graded=len(graded),
        success=sum(is_success(result, success_threshold) for result in graded) / max(len(graded), 1),
        mean_reward=compute_mean(rewards) or 0.0,
        pass_at=found,
        not_graded=dict(Counter(result.outcome for result in results if result.outcome not in GRADED)),
        versions=tuple(sorted({version for result in graded for version in result.policy_versions})),
    )


def summarise_by_environment(
    results: Sequence[EpisodeFinished], ks: Sequence[int], *, success_threshold: float = 1.0
) -> dict[str, Summary]:
    """A summary for every environment that a task names."""
    found: defaultdict[str, list[EpisodeFinished]] = defaultdict(list)
    for result in results:
        found[result.env].append(result)
    return {env: summarise_results(found[env], ks, success_threshold=success_threshold) for env in sorted(found)}
