"""Is one worker or replica unlike the others? Failures, prompts, log-probabilities and rewards by worker. Pure.

Each is held against all others in the same steps; with one worker of a role there is nothing to hold it against.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from fleetbus.core.diagnosis.engine_checks import find_mismatch_bound
from fleetbus.core.diagnosis.facts import EpisodeFacts, RunFacts, StepFacts, mean_of
from fleetbus.core.diagnosis.intervals import find_share_interval
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import Onset, find_onset

FAILURES = 0.1
"""Share of failed episodes beyond that of the others."""

REWARD = 0.15
"""Reward below that of the others on the same tasks."""

FEWEST_PROMPTS = 3
ODD_SHARE = 0.5
"""So many prompts, and such a share of its prompts since the first, a replica has to make otherwise than all others."""

MAX_WORKERS = 512
"""Workers of a role that are looked at one by one; those with most episodes come first."""

Value = Callable[[EpisodeFacts], float]


def check_workers(run: RunFacts, looking: Looking) -> None:
    """All of them."""
    _check_prompts(run, looking)
    differences = {episode: size for step in run.steps for episode, size in step.differences.items()}
    _check_replicas(
        run, looking, "replica_differs", find_mismatch_bound(run),
        lambda each: differences.get(each.episode_id, math.nan), "more nats per token than the {count} others",
    )  # fmt: skip
    means = {task: mean_of(each.reward for each in of_task if each.is_graded and each.reward is not None)
             for task, of_task in run.tasks.items()}  # fmt: skip
    _check_replicas(
        run, looking, "replica_scores_less", REWARD,
        lambda each: means[each.task] - each.reward if each.is_graded and each.reward is not None else math.nan,
        "less reward than the mean of the same tasks, beside {count} others",
    )  # fmt: skip
    workers = _list_names(each.worker for each in run.episodes)
    for worker in workers if len(workers) > 1 else ():
        values = _compare(run.steps, lambda each: each.worker, worker, _is_failed)
        if (onset := find_onset(values, FAILURES, tests=len(workers))) is not None:
            looking.report("bad_worker", onset, _describe_failures(run, worker, onset), subject=worker)


def _check_replicas(run: RunFacts, looking: Looking, kind: str, bound: float, value: Value, text: str) -> None:
    replicas = _list_names(each.replica for each in run.episodes if each.replica)
    for replica in replicas if len(replicas) > 1 else ():
        values = _compare(run.steps, lambda each: each.replica, replica, value)
        if (onset := find_onset(values, bound, tests=len(replicas))) is not None:
            looking.report(kind, onset, f"{replica}: {text.format(count=len(replicas) - 1)}", subject=replica)


def _check_prompts(run: RunFacts, looking: Looking) -> None:
    """A replica whose tokens of the same messages are those of no other replica; no matter of statistics. Where a template
    depends on the day, replicas share what they make of it."""
    shared = [each.rendered for each in run.prompts if len(each.rendered) > 1]
    if not shared:
        looking.unmeasured.append("prompts by replica")
    compared, odd = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for rendered in shared:
        makers = Counter(digest for digests in rendered.values() for digest in digests)
        for replica, digests in rendered.items():
            for digest, episodes in digests.items():
                compared[replica].update(episodes)
                odd[replica].update(episodes if makers[digest] == 1 else ())
    found: dict[str, tuple[list[int], int]] = {}
    for replica, unlike in odd.items():
        steps = sorted(run.step_of[each] for each in unlike if each in run.step_of)
        since = sum(run.step_of.get(each, -1) >= steps[0] for each in compared[replica]) if steps else 0
        if len(steps) >= max(FEWEST_PROMPTS, ODD_SHARE * since):
            found[replica] = (steps, since)
    for replica in _choose_odd(run, {name: odd[name] for name in found}):
        steps, since = found[replica]
        size = find_share_interval(len(steps), since)
        text = f"{replica}: {len(steps)} of {since} episodes that can be compared, the first is {min(odd[replica])}"
        looking.report("prompt_differs", Onset(step=steps[0], steps=len(set(steps)), size=size), text, subject=replica)


def _choose_odd(run: RunFacts, odd: dict[str, set[str]]) -> list[str]:
    """Of two replicas that differ from each other the one with less reward in these episodes; of more, all that agree with
    nobody."""
    if len(odd) != 2:
        return list(odd)
    rewards = {each.episode_id: each.reward or 0.0 for each in run.episodes}
    means = {replica: mean_of(rewards.get(each, 0.0) for each in episodes) for replica, episodes in odd.items()}
    return [min(sorted(means), key=means.__getitem__)]


def _compare(steps: Iterable[StepFacts], owner: Callable[[EpisodeFacts], str], name: str, value: Value) -> dict[int, float]:
    """By step the mean of one owner's episodes less that of the others'."""
    found = {}
    for step in steps:
        own: list[float] = []
        others: list[float] = []
        for each in step.settled:
            if math.isfinite(size := value(each)):
                (own if owner(each) == name else others).append(size)
        found[step.step] = mean_of(own) - mean_of(others)
    return found


def _is_failed(each: EpisodeFacts) -> float:
    return float(each.outcome in ("env_failed", "verifier_unknown", "timeout", "lost"))


def _list_names(names: Iterable[str]) -> list[str]:
    return [name for name, _ in Counter(names).most_common(MAX_WORKERS)]


def _describe_failures(run: RunFacts, worker: str, onset: Onset) -> str:
    since = [each for each in run.episodes if run.step_of[each.episode_id] >= onset.step]
    outcomes = Counter(each.outcome for each in since if each.worker == worker and _is_failed(each))
    own = sum(each.worker == worker for each in since)
    listed = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    others = mean_of(_is_failed(each) for each in since if each.worker != worker)
    return f"{worker}: {listed} of {own} episodes; the others fail {others:.1%}"
