"""Checks of how episodes end: truncation, length, what the reward pays for. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from fleetbus.core.diagnosis.facts import EpisodeFacts, RunFacts, StepFacts, mean_of
from fleetbus.core.diagnosis.intervals import find_mean_interval
from fleetbus.core.diagnosis.looking import Looking
from fleetbus.core.diagnosis.onset import Onset, find_onset

TRUNCATED = 0.25
CORRELATION = 0.6
ALL_OF_REWARD = 0.9
"""A correlation, over all episodes of a step, that leaves nothing else to be rewarded."""

FEWEST_LEVELS = 3
"""Rewards of a step that differ. With two, those that fail early are shorter, and nothing is wrong."""

FEWEST_EPISODES = 8
"""With others of the same group and as many turns: fewer of a step say nothing of a correlation."""

LENGTH = 1.5
"""Times the length at the start, or divided by it."""

BASELINE_STEPS = 5
"""The start of a run, that lengths and entropies are held against."""

MORE_SUCCESS = 0.05
"""A change that came with so much more success is learning."""


def check_truncation(run: RunFacts, looking: Looking) -> None:
    """The share of graded episodes that used up turns or tokens."""
    shares = run.list_shares(lambda each: each.outcome == "truncated", lambda each: each.is_graded)
    onset = looking.watch("truncated, share of graded episodes", shares, TRUNCATED)
    if onset is not None:
        since = [each for step in run.steps if step.step >= onset.step for each in step.settled]
        cut = mean_of(each.reward or 0.0 for each in since if each.outcome == "truncated")
        whole = mean_of(each.reward or 0.0 for each in since if each.outcome == "completed")
        looking.report("truncation", onset, f"reward {cut:.2f} when truncated, {whole:.2f} when completed")


def check_reward_of_length(run: RunFacts, looking: Looking) -> None:
    """The correlation of reward and length among episodes of one group with as many turns: more turns may be better work.
    Where such episodes are all as long, that of all episodes, if it became nearly 1 during the run: a task does not change."""
    values = {step.step: correlate_length(step) for step in run.steps}
    onset = looking.watch("correlation of reward and length", values, CORRELATION) or _find_change(run)
    if onset is not None:
        lengths = {step.step: mean_of(each.length for each in step.trained) for step in run.steps}
        last = max(lengths)
        text = f"mean length {lengths[onset.step]:.0f} tokens at step {onset.step}, {lengths[last]:.0f} at step {last}"
        looking.report("reward_follows_length", onset, text)


def _find_change(run: RunFacts) -> Onset | None:
    """The step since which length alone decides the reward, if it did not do so in the steps before."""
    done = {step.step: [each for each in step.settled if each.is_graded and each.outcome == "completed"] for step in run.steps}
    values = {step: _correlate([(each.length, each.reward or 0.0) for each in episodes]) for step, episodes in done.items()}
    levels = {step: len({each.reward for each in episodes}) for step, episodes in done.items()}
    graded = {step: value if levels[step] >= FEWEST_LEVELS else math.nan for step, value in values.items()}
    onset = find_onset(graded, ALL_OF_REWARD)
    before = [value for step, value in values.items() if onset is not None and step < onset.step and math.isfinite(value)]
    return onset if len(before) >= BASELINE_STEPS and mean_of(before) < CORRELATION else None


def check_length(run: RunFacts, looking: Looking) -> None:
    """Mean length against the start of the run, unless success rose with it."""
    lengths = {step.step: mean_of(each.length for each in step.trained) for step in run.steps}
    base = mean_of([value for value in lengths.values() if math.isfinite(value)][:BASELINE_STEPS])
    ratios = {step: value / base if base else math.nan for step, value in lengths.items()}
    looking.measure("length, times that at the start", ratios, LENGTH)
    logs = {step: math.log(value) if value > 0 else math.nan for step, value in ratios.items()}
    for sign in (1, -1):
        onset = find_onset({step: sign * value for step, value in logs.items()}, math.log(LENGTH), tests=2)
        if onset is not None and not has_improved(run, onset.step):
            since = [value for step, value in ratios.items() if step >= onset.step and math.isfinite(value)]
            sized = Onset(step=onset.step, steps=onset.steps, size=find_mean_interval(since))
            looking.report("length_drift", sized, f"{base:.0f} tokens in the first {BASELINE_STEPS} steps")


def has_improved(run: RunFacts, step: int) -> bool:
    """True if success since ``step`` is above that of the run's start."""
    start = mean_of(each.is_success for each in _list_graded(run.steps[:BASELINE_STEPS]))
    since = mean_of(each.is_success for each in _list_graded([each for each in run.steps if each.step >= step]))
    return since > start + MORE_SUCCESS


def _list_graded(steps: list[StepFacts]) -> list[EpisodeFacts]:
    return [each for step in steps for each in step.settled if each.is_graded]


def correlate_length(step: StepFacts) -> float:
    """Pearson's correlation of reward and length, each less its mean in its group among episodes with as many turns; NaN where
    too few differ."""
    strata: defaultdict[tuple[str, int], list[EpisodeFacts]] = defaultdict(list)
    for each in step.settled:
        if each.is_graded and each.outcome == "completed":
            strata[each.group_id, each.turns].append(each)
    pairs: list[tuple[float, float]] = []
    for members in strata.values():
        length = mean_of(each.length for each in members)
        reward = mean_of(each.reward or 0.0 for each in members)
        centred = [(each.length - length, (each.reward or 0.0) - reward) for each in members]
        if any(x for x, _ in centred) and any(abs(y) > 1e-9 for _, y in centred):
            pairs += centred
    return _correlate(pairs)


def _correlate(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation; NaN for few pairs, and for those that do not differ in one of both."""
    if len(pairs) < FEWEST_EPISODES:
        return math.nan
    means = [mean_of(pair[place] for pair in pairs) for place in (0, 1)]
    centred = [(x - means[0], y - means[1]) for x, y in pairs]
    xx, yy = (math.fsum(pair[place] ** 2 for pair in centred) for place in (0, 1))
    xy = math.fsum(x * y for x, y in centred)
    return xy / math.sqrt(xx * yy) if min(xx, yy) > 1e-9 else math.nan
