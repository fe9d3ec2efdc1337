"""Is there something to learn from? Groups without an advantage, tasks that are never solved, tasks that are dropped. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fleetbus.core.diagnosis.facts import EpisodeFacts, RunFacts, StepFacts, mean_of
from fleetbus.core.diagnosis.intervals import find_mean_interval, find_share_interval
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import FALSE_ALARMS, FEWEST_STEPS, TESTS, Onset, find_begin, find_onset

ALL_WRONG = 0.5
ALL_RIGHT = 0.9

HARDER = 4.0
"""A task that is never solved counts if one that many times as hard as the others would have been solved by now."""

UNSOLVABLE = 0.2
"""Share of tasks."""

DROPPED = 0.25
"""Share of its episodes that a task loses beyond what the others lose."""

BIAS = 0.03
"""Reward by which the mean of what is trained is off that of all that was played."""

DROPPING = frozenset(
    {"stale", "timeout", "lost", "env_failed", "verifier_unknown", "group_too_small", "cancelled", "group_cut"}
)
"""Reasons that are no verdict on a task."""


def check_groups(run: RunFacts, looking: Looking) -> None:
    """The share of groups whose episodes all succeed, and of those in which none does and all rewards are equal."""
    wrong, right = ({step.step: _find_share(step, is_right) for step in run.steps} for is_right in (False, True))
    if (onset := looking.watch("groups all wrong, share", wrong, ALL_WRONG)) is not None:
        looking.report("all_wrong_groups", onset, "none of their episodes succeeds, and all have the same reward")
    if (onset := looking.watch("groups all right, share", right, ALL_RIGHT)) is not None:
        looking.report("all_right_groups", onset, "all of their episodes succeed")


def check_tasks(run: RunFacts, looking: Looking) -> None:
    """The share of tasks without any success, of those that were tried often enough to be sure."""
    graded = {task: [each for each in of_task if each.is_graded] for task, of_task in run.tasks.items()}
    known = {task: of_task for task, of_task in graded.items() if of_task}
    solved = [each for of_task in known.values() if any(e.is_success for e in of_task) for each in of_task]
    rate = mean_of(each.is_success for each in solved)
    never = [task for task, of_task in known.items() if not any(each.is_success for each in of_task)]
    sure = [task for task in never if _is_improbable(len(known[task]), rate, len(known))]
    if not solved or not known:
        looking.unmeasured.append("unsolvable tasks")
        return
    size = find_share_interval(len(sure), len(known))
    strict = find_share_interval(len(sure), len(known), 1 - 2 * FALSE_ALARMS)
    looking.add("never solved, share of tasks", size, len(run.steps), UNSOLVABLE)
    if sure and strict.low > UNSOLVABLE:
        steps = [run.step_of[each.episode_id] for task in sure for each in known[task]]
        text = f"{len(sure)} of {len(known)} tasks, {_list_some(sure)}; the others succeed in {rate:.0%} of their episodes"
        looking.report("unsolvable_tasks", Onset(step=min(steps), steps=len(set(steps)), size=size), text)


def check_dropped(run: RunFacts, looking: Looking) -> None:
    """Tasks that lose more of their episodes than the others, and what that does to the mean reward."""
    dropped = run.list_shares(_is_dropped)
    looking.measure("settled without training, share of episodes", dropped, math.inf)
    _check_bias(run, looking)
    overall = mean_of(_is_dropped(each) for each in run.episodes)
    losing = {task for task, of_task in run.tasks.items() if _loses_more(of_task, overall, len(run.tasks))}
    if not losing:
        return
    values = {}
    for step in run.steps:
        own = mean_of(_is_dropped(each) for each in step.settled if each.task in losing)
        others = mean_of(_is_dropped(each) for each in step.settled if each.task not in losing)
        values[step.step] = own - others
    onset = find_onset(values, DROPPED) or _find_onset_by_groups(run, values)
    if onset is None:
        return
    since = [each for step in run.steps if step.step >= onset.step for each in step.settled]
    reasons = Counter(each.reason for each in since if each.task in losing and _is_dropped(each))
    own, others = (mean_of(each.seconds for each in since if (each.task in losing) is chosen) for chosen in (True, False))
    text = f"{len(losing)} of {len(run.tasks)} tasks, {_list_some(sorted(losing))}: {_list_counts(reasons)}"
    looking.report("tasks_dropped", onset, f"{text}; they take {own:.1f} s, the others {others:.1f} s")


def _check_bias(run: RunFacts, looking: Looking) -> None:
    """By step the mean reward of what is trained less that of all that was played; an episode without a grade counts as the
    mean of its task. Groups without a signal are left out by choice, and no part of it."""
    means = {task: mean_of(e.reward or 0.0 for e in of_task if e.is_graded) for task, of_task in run.tasks.items()}
    values = {}
    for step in run.steps:
        played = [(each, each.reward if each.is_graded and each.reward is not None else means[each.task])
                  for each in step.settled if not each.reason or _is_dropped(each)]  # fmt: skip
        trained = mean_of(reward for each, reward in played if not each.reason)
        values[step.step] = trained - mean_of(reward for _, reward in played if math.isfinite(reward))
    looking.measure("reward of what is trained beyond that of all", values, BIAS)
    for sign in (1, -1):
        onset = find_onset({step: sign * value for step, value in values.items()}, BIAS, tests=2)
        if onset is not None:
            since = [value for step, value in values.items() if step >= onset.step and math.isfinite(value)]
            sized = Onset(step=onset.step, steps=onset.steps, size=find_mean_interval(since))
            left = Counter(e.reason for s in run.steps if s.step >= onset.step for e in s.settled if _is_dropped(e))
            looking.report("exclusion_bias", sized, f"left out: {_list_counts(left)}")


def _find_share(step: StepFacts, is_right: bool) -> float:
    groups: defaultdict[str, list[EpisodeFacts]] = defaultdict(list)
    for each in step.settled:
        if each.is_graded and (not each.reason or each.reason == "no_signal"):
            groups[each.group_id].append(each)
    known = [members for members in groups.values() if len(members) > 1]
    return mean_of(_is_dead(members, is_right) for members in known)


def _is_dead(members: Sequence[EpisodeFacts], is_right: bool) -> bool:
    rewards = {each.reward if each.trained_reward is None else each.trained_reward for each in members}
    return len(rewards) == 1 and all(each.is_success is is_right for each in members)


def _is_improbable(tries: int, rate: float, tasks: int) -> bool:
    """True if a task that is `HARDER` than the others would hardly have failed so often, whichever of the tasks it is."""
    return rate > 0 and tries * math.log1p(-min(rate / HARDER, 0.999)) < math.log(FALSE_ALARMS / tasks)


def _find_onset_by_groups(run: RunFacts, values: Mapping[int, float]) -> Onset | None:
    """The same by whole groups, where few steps settle any of the tasks that lose: a group that is stale leaves as one, so
    tasks and run are judged by how many of their groups did."""
    if (begin := find_begin(values, DROPPED)) is None:
        return None
    groups: dict[str, dict[str, bool]] = defaultdict(dict)
    steps: dict[str, set[int]] = defaultdict(set)
    for step in run.steps:
        for each in step.settled if step.step >= begin else ():
            groups[each.task][each.group_id] = _is_dropped(each)
            steps[each.task].add(step.step)
    overall = mean_of(is_dropped for of_task in groups.values() for is_dropped in of_task.values())
    level = 1 - 2 * FALSE_ALARMS / max(len(groups), 1)
    losing = [name for name, each in groups.items() if find_share_interval(sum(each.values()), len(each), level).low > overall]
    own = [is_dropped for task in losing for is_dropped in groups[task].values()]
    others = mean_of(is_dropped for task in groups.keys() - losing for is_dropped in groups[task].values())
    lost, counted = sum(own), set[int]().union(*(steps[task] for task in losing))
    strict = find_share_interval(lost, max(len(own), 1), 1 - 2 * FALSE_ALARMS / (TESTS * len(values)))
    if len(counted) < FEWEST_STEPS or not strict.low > DROPPED + others:
        return None
    return Onset(step=begin, steps=len(counted), size=find_share_interval(lost, len(own)))


def _loses_more(of_task: Sequence[EpisodeFacts], overall: float, tasks: int) -> bool:
    """By Wilson's interval at a level that is divided among the tasks."""
    lost = sum(map(_is_dropped, of_task))
    return find_share_interval(lost, len(of_task), 1 - 2 * FALSE_ALARMS / tasks).low > overall


def _is_dropped(each: EpisodeFacts) -> bool:
    return each.reason in DROPPING


def _list_some(names: Iterable[str], most: int = 3) -> str:
    found = sorted(names)
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def _list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
